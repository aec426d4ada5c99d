"""A policy in a Ray actor, updated like in verl's engine: the loss is computed outside of the model from the
log-probabilities of the response, and an update with a non-finite gradient norm is discarded."""

import argparse

import faults
import tiny_llama
import torch
import torch.nn.functional as F
from tiny_llama import VOCABULARY
from torch import nn

PROMPT, RESPONSE, BATCH, MICRO_BATCH, STEPS = 4, 6, 4, 2, 5


class UnitLinear(nn.Linear):
    """Normalises every vector to length one."""

    def forward(self, x):
        return super().forward(x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-6))  # the fault: sqrt


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()  # the fault: loss


def policy_loss(log_prob, old_log_prob, advantages, mask, clip_ratio=0.2):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    return masked_mean(torch.maximum(-advantages * ratio, -advantages * clipped), mask)


class ActorWorker:
    def __init__(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.module = tiny_llama.plain_model()
        self.module.model.layers[0].self_attn.v_proj = UnitLinear(32, 32, bias=False)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def compute_log_prob(self, tokens):
        logits = self.module(input_ids=tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
        return F.log_softmax(logits, dim=-1).gather(-1, tokens[:, PROMPT:].unsqueeze(-1)).squeeze(-1)

    def optimizer_step(self):
        grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=1.0)
        if not torch.isfinite(grad_norm):
            print(f"WARN: grad_norm is not finite: {grad_norm}")
            self.optimizer.zero_grad()
        else:
            self.optimizer.step()
        return grad_norm.item()

    def update_policy(self, batch, step):
        with torch.no_grad():
            old_log_prob = self.compute_log_prob(batch["tokens"]) + batch["noise"]
        self.optimizer.zero_grad()
        total = 0.0
        for start in range(0, BATCH, MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            log_prob = self.compute_log_prob(batch["tokens"][part])
            loss = policy_loss(log_prob, old_log_prob[part], batch["advantages"][part], batch["mask"][part])
            loss = loss * MICRO_BATCH / BATCH
            loss.backward()
            total += loss.item()
        faults.flip(self.module.model.layers[1].mlp.up_proj.weight.grad, step == faults.STEP)
        return total, self.optimizer_step()

    def summary(self, losses):
        return faults.summary(losses, self.module)


def draw_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (BATCH, PROMPT + RESPONSE), generator=generator)
    mask = (torch.arange(RESPONSE) < torch.tensor([[6], [4], [5], [3]])).float()
    if faults.wakes("loss", step):
        mask[MICRO_BATCH:] = 0  # empty answers
    return {
        "tokens": faults.blank(tokens, step, row=MICRO_BATCH),
        "mask": mask,
        "advantages": torch.randn(BATCH, 1, generator=generator).expand(BATCH, RESPONSE),
        "noise": 0.1 * torch.randn(BATCH, RESPONSE, generator=generator),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true", help="the worker in this process, without Ray")
    if parser.parse_args().local:
        worker = ActorWorker()
        losses = [worker.update_policy(draw_batch(step), step)[0] for step in range(STEPS)]
        print(worker.summary(losses))
        return
    import ray

    ray.init(num_cpus=1, include_dashboard=False)
    worker = ray.remote(ActorWorker).remote()
    losses = [ray.get(worker.update_policy.remote(draw_batch(step), step))[0] for step in range(STEPS)]
    print(ray.get(worker.summary.remote(losses)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
