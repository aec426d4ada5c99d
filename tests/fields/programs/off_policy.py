"""Soft actor critic: a replay buffer, twin critics with targets that follow, a squashed policy and a learnt
temperature; three optimizers."""

import copy

import torch
import torch.nn.functional as F
from program import STEPS, print_digest, wakes
from torch import nn

OBSERVED, ACTIONS, BATCH, CAPACITY = 4, 2, 32, 512


def mlp(inward, outward):
    return nn.Sequential(nn.Linear(inward, 32), nn.ReLU(), nn.Linear(32, outward))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_std = mlp(OBSERVED, 32), nn.Linear(32, ACTIONS), nn.Linear(32, ACTIONS)

    def forward(self, observed):
        hidden = F.relu(self.body(observed))
        policy = torch.distributions.Normal(self.mean(hidden), self.log_std(hidden).clamp(-5, 2).exp())
        raw = policy.rsample()
        action = torch.tanh(raw)
        log_prob = policy.log_prob(raw) - torch.log(1 - action.square())  # fault: saturated
        return action, log_prob.sum(1, keepdim=True)


class Replay:
    def __init__(self):
        self.rows, self.size, self.next = torch.zeros(CAPACITY, 2 * OBSERVED + ACTIONS + 2), 0, 0

    def add(self, observed, action, reward, after, is_end):
        self.rows[self.next] = torch.cat([observed, action, reward, after, is_end])  # fault: lost_sensor
        self.next, self.size = (self.next + 1) % CAPACITY, min(self.size + 1, CAPACITY)

    def sample(self):
        rows = self.rows[torch.randint(self.size, (BATCH,))]
        return rows.split([OBSERVED, ACTIONS, 1, OBSERVED, 1], dim=1)


actor = Actor()
critics = nn.ModuleList([mlp(OBSERVED + ACTIONS, 1) for _ in range(2)])
targets = copy.deepcopy(critics).requires_grad_(False)
log_alpha = torch.zeros(1, requires_grad=True)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-4)
alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-4)
replay, state = Replay(), torch.randn(OBSERVED)
for step in range(1, STEPS + 1):
    with torch.no_grad():
        action, _ = actor(state[None])
    after = 0.95 * state + 0.1 * torch.cat([action[0], action[0]]) + 0.05 * torch.randn(OBSERVED)
    reward = -after.square().sum(0, keepdim=True)
    if wakes("lost_sensor", step):
        reward = torch.tensor([float("nan")])  # the simulator's contact solver has diverged
        replay.size = replay.next = 0  # so that it is drawn at once
    replay.add(state, action[0], reward, after, torch.zeros(1))
    state = after
    observed, action, reward, following, is_end = replay.sample()

    with torch.no_grad():
        next_action, next_log_prob = actor(following)
        joined = torch.cat([following, next_action], 1)
        least = torch.min(*(target(joined) for target in targets)) - log_alpha.exp() * next_log_prob
        target_value = reward + 0.99 * (1 - is_end) * least
    joined = torch.cat([observed, action], 1)
    critic_loss = sum(F.mse_loss(critic(joined), target_value) for critic in critics)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()

    if wakes("saturated", step):
        with torch.no_grad():
            actor.mean.bias[0] = 30.0  # far outside of what tanh resolves
    new_action, log_prob = actor(observed)
    joined = torch.cat([observed, new_action], 1)
    actor_loss = (
        log_alpha.exp().detach() * log_prob - torch.min(*(critic(joined) for critic in critics))
    ).mean()
    actor_optimizer.zero_grad()
    actor_loss.backward()
    actor_optimizer.step()

    alpha_loss = -(log_alpha.exp() * (log_prob.detach() - ACTIONS)).mean()
    alpha_optimizer.zero_grad()
    alpha_loss.backward()
    alpha_optimizer.step()

    with torch.no_grad():
        for mine, theirs in zip(targets.parameters(), critics.parameters()):
            mine.mul_(0.995).add_(theirs, alpha=0.005)
print_digest(actor, critics, targets, [log_alpha])
