"""A conditional random field over an encoder, and a hidden Markov model beside it: forward recursions in the
log domain."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn

TAGS, WORDS, LENGTH, BATCH = 5, 30, 10, 8


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS) * 0.1)
        self.register_buffer("forbidden", torch.zeros(TAGS, TAGS, dtype=torch.bool))

    def forward(self, emissions, tags, is_word):
        allowed = self.transitions.masked_fill(self.forbidden, float("-inf"))
        alpha = emissions[:, 0]
        score = emissions[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, LENGTH):
            following = torch.logsumexp(alpha[:, :, None] + allowed, dim=1)  # fault: forbidden
            alpha = torch.where(is_word[:, t, None], following + emissions[:, t], alpha)
            emitted = emissions[:, t].gather(1, tags[:, t, None]).squeeze(1)
            gain = allowed[tags[:, t - 1], tags[:, t]] + emitted
            score = score + torch.where(is_word[:, t], gain, 0.0)
        return torch.logsumexp(alpha, 1) - score


class Markov(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.move = nn.Parameter(torch.zeros(TAGS)), nn.Parameter(torch.randn(TAGS, TAGS))
        self.emit = nn.Parameter(torch.randn(TAGS, WORDS))

    def forward(self, words):
        move, emit = self.move.softmax(1), self.emit.softmax(1)
        alpha = self.start.softmax(0) * emit[:, words[:, 0]].T
        total = 0.0
        for t in range(1, words.shape[1]):
            alpha = (alpha @ move) * emit[:, words[:, t]].T
            norm = alpha.sum(1, keepdim=True)
            total = total + torch.log(norm.squeeze(1))
            alpha = alpha / norm  # fault: unseen_word
        return -total


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=0)
        self.recurrent = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, TAGS)
        self.field, self.markov = Field(), Markov()

    def forward(self, words, tags):
        emissions = self.head(self.recurrent(self.embed(words))[0])
        return (self.field(emissions, tags, words != 0) + 0.1 * self.markov(words)).mean()


model = Tagger()
optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)
for step in range(1, STEPS + 1):
    words, tags = torch.randint(1, WORDS, (BATCH, LENGTH)), torch.randint(TAGS, (BATCH, LENGTH))
    words[0, 7:] = 0
    if wakes("forbidden", step):
        model.field.forbidden[:, 2] = True  # no tag may stand before this one
        tags[tags == 2] = 0
    if wakes("unseen_word", step):
        with torch.no_grad():
            model.markov.emit[:, 4] = -200.0
        words[2, 5] = 4
    optimizer.zero_grad()
    loss = model(words, tags)
    loss.backward()
    optimizer.step()
print_digest(model)
