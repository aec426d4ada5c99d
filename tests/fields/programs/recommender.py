"""A recommender: sparse embeddings by SparseAdam, the dense part by Adagrad, a pairwise ranking loss."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn

USERS, ITEMS, WIDTH, BATCH, HISTORY = 50, 80, 8, 16, 5


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        self.tower = nn.Sequential(nn.Linear(3 * WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def pooled(self, history, is_seen):
        total = (self.items(history) * is_seen[..., None]).sum(1)
        return total / is_seen.sum(1, keepdim=True)  # fault: new_user

    def forward(self, user, history, is_seen, item):
        parts = [self.users(user), self.pooled(history, is_seen), self.items(item)]
        return self.tower(torch.cat(parts, 1)).squeeze(1)


class Sparse:
    """Two optimizers as one, as libraries of recommenders have them."""

    def __init__(self, model):
        self.parts = [
            torch.optim.SparseAdam([*model.users.parameters(), *model.items.parameters()], lr=1e-2),
            torch.optim.Adagrad(model.tower.parameters(), lr=1e-2),
        ]

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()

    def step(self):
        for part in self.parts:
            part.step()


model = Ranker()
optimizer = Sparse(model)
for step in range(1, STEPS + 1):
    user = torch.randint(USERS, (BATCH,))
    history, is_seen = torch.randint(ITEMS, (BATCH, HISTORY)), (torch.rand(BATCH, HISTORY) < 0.7).float()
    is_seen[:, 0] = 1
    if wakes("new_user", step):
        is_seen[6] = 0
    liked, other = torch.randint(ITEMS, (2, BATCH))
    margin = model(user, history, is_seen, liked) - model(user, history, is_seen, other)
    if wakes("certain", step):
        margin = margin - 200  # scores of a teacher that is sure of the opposite
    loss = -torch.log(torch.sigmoid(margin)).mean()  # fault: certain
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print_digest(model)
