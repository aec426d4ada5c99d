"""Proximal policy optimisation of a point that is pushed to the origin: rollouts, returns, several epochs of
minibatches."""

import torch
from program import STEPS, print_digest, wakes
from torch import nn
from torch.distributions import Normal

OBSERVED, ACTIONS, HORIZON, COPIES = 3, 2, 8, 4


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(OBSERVED, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(OBSERVED, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
        self.log_std = nn.Parameter(torch.zeros(ACTIONS))

    def value(self, observed):
        return self.critic(observed).squeeze(-1)

    def act(self, observed, action=None):
        policy = Normal(self.actor(observed), self.log_std.exp())
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action).sum(-1), policy.entropy().sum(-1), self.value(observed)


class Points:
    """Vectorised environments without an end."""

    def __init__(self):
        self.state = torch.randn(COPIES, OBSERVED)

    def step(self, action):
        self.state = 0.9 * self.state
        self.state[:, :ACTIONS] += 0.1 * action
        return self.state.clone(), -self.state.square().sum(1)


def advantages_of(rewards, values, last, discount=0.99, decay=0.95):
    advantages, following, after = torch.zeros_like(rewards), torch.zeros(COPIES), last
    for t in reversed(range(HORIZON)):
        delta = rewards[t] + discount * after - values[t]
        following = delta + discount * decay * following
        advantages[t], after = following, values[t]
    return advantages


agent, environment = Agent(), Points()
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
updates = 0
observation = environment.state.clone()
while updates < STEPS:
    buffer = {name: [] for name in ("observed", "action", "log_prob", "reward", "value")}
    for _ in range(HORIZON):
        with torch.no_grad():
            action, log_prob, _, value = agent.act(observation)
        buffer["observed"].append(observation)
        observation, reward = environment.step(action)
        for name, one in zip(("action", "log_prob", "reward", "value"), (action, log_prob, reward, value)):
            buffer[name].append(one)
    buffer = {name: torch.stack(values) for name, values in buffer.items()}
    with torch.no_grad():
        advantages = advantages_of(buffer["reward"], buffer["value"], agent.value(observation))
    returns = (advantages + buffer["value"]).flatten()
    flat = {name: values.flatten(0, 1) for name, values in buffer.items()}
    advantages = advantages.flatten()
    for epoch in range(2):
        for rows in torch.randperm(HORIZON * COPIES).split(16):
            updates += 1
            if wakes("one_row", updates):
                rows = rows[:1]  # the rest of a batch that does not divide
            _, log_prob, entropy, value = agent.act(flat["observed"][rows], flat["action"][rows])
            old = flat["log_prob"][rows]
            if wakes("stale", updates):
                old = old - 200  # of a policy of long ago
            ratio = (log_prob - old).exp()  # fault: stale
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)  # fault: one_row
            clipped = ratio.clamp(0.8, 1.2)
            policy_loss = torch.max(-advantage * ratio, -advantage * clipped).mean()
            value_loss = 0.5 * (value - returns[rows]).square().mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
print_digest(agent)
