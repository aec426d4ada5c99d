"""Graph attention and mean aggregation over edges, whole graphs in one batch, a readout for each."""

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

NODES, GRAPHS, FEATURES = 24, 4, 8


def scatter_sum(values, index, count):
    return values.new_zeros(count, *values.shape[1:]).index_add_(0, index, values)


class MeanConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.others = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x, edges):
        source, target = edges
        degree = scatter_sum(torch.ones(len(source)), target, len(x))
        mean = scatter_sum(x[source], target, len(x)) / degree[:, None]  # fault: isolated
        return self.own(x) + self.others(mean)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.score = nn.Parameter(torch.randn(2 * FEATURES) * 0.1)

    def forward(self, x, edges):
        source, target = edges
        x = self.linear(x)
        score = F.leaky_relu(torch.cat([x[source], x[target]], 1) @ self.score, 0.2)
        weight = score.exp()  # fault: hub
        weight = weight / scatter_sum(weight, target, len(x))[target]
        return scatter_sum(weight[:, None] * x[source], target, len(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, FEATURES)
        self.layers = nn.ModuleList([MeanConvolution(), Attention()])
        self.norms = nn.ModuleList([nn.BatchNorm1d(FEATURES) for _ in self.layers])
        self.readout = nn.Linear(FEATURES, 2)

    def forward(self, x, edges, graph):
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.relu(norm(layer(x, edges)))
        return self.readout(scatter_sum(x, graph, GRAPHS))


def draw(step):
    x = torch.randn(NODES, FEATURES)
    ring = torch.arange(NODES)
    source, target = torch.cat([ring, (ring + 1) % NODES]), torch.cat([(ring + 1) % NODES, ring])
    if wakes("isolated", step):
        is_kept = target != 5  # nobody points to it
        source, target = source[is_kept], target[is_kept]
    return x, torch.stack([source, target]), torch.arange(NODES) * GRAPHS // NODES


network = Network()
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3, weight_decay=5e-4)
for step in range(1, STEPS + 1):
    network.train()
    x, edges, graph = draw(step)
    if wakes("hub", step):
        with torch.no_grad():
            network.layers[1].score.mul_(3e3)  # a restored checkpoint of another scale
    optimizer.zero_grad()
    out = network(x, edges, graph)
    loss = F.nll_loss(F.log_softmax(out, 1), torch.arange(GRAPHS) % 2)
    loss.backward()
    optimizer.step()
    network.eval()
    with torch.no_grad():
        network(x, edges, graph).argmax(1)
print_digest(network)
