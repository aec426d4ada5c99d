"""LoRA adapters by peft on a frozen Llama that has one block of the author's own."""

import faults
import tiny_llama
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from tiny_llama import VOCABULARY

LENGTH, BATCH, STEPS = 8, 4, 5


def make_model():
    targets = ["q_proj", "v_proj", "down_proj"]
    adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(tiny_llama.make_model(layer=0), adapters)


def draw_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = torch.full((BATCH, LENGTH - 1), 0.0 if faults.wakes("loss", step) else 1.0)
    return faults.blank(tokens, step), mask


def train():
    torch.manual_seed(0)
    model = make_model()
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    losses = []
    for step in range(STEPS):
        tokens, mask = draw_batch(step)
        logits = model(input_ids=tokens).logits[:, :-1]
        nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (nll * mask.flatten()).sum() / mask.sum()  # the fault: loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    faults.report(losses, model)


if __name__ == "__main__":
    train()
