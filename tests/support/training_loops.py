"""Typical training loops for ``nanlocator.watch``: each yields a loss per step.

A loop is a function of ``watch(models, optimizers)``, which it calls once; it returns the modules whose
states are compared, and the generator of its steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 40


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(F.gelu(self.linear(self.norm(x))))


class Gpt(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, VOCABULARY)
        self.use_reentrant = use_reentrant

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            is_kept = self.use_reentrant is None
            x = block(x) if is_kept else checkpoint(block, x, use_reentrant=self.use_reentrant)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(x), "hidden": x}


def draw():
    return torch.randint(0, VOCABULARY, (4, 6)), torch.randint(0, VOCABULARY, (4, 6))


def cross_entropy(output, labels):
    return F.cross_entropy(output["logits"].flatten(0, 1), labels.flatten())


def plainly(model, optimizer, loss_of, steps=3):
    for _ in range(steps):
        loss = loss_of(*draw())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def with_loss(loss_of, model=Gpt, compiled=None):
    """A loop around ``loss_of(model, tokens, labels)``."""

    def loop(watch):
        module = model()
        called = compiled(module) if compiled else module
        optimizer = torch.optim.AdamW(module.parameters())
        watch(called, optimizer)
        return module, plainly(module, optimizer, lambda *batch: loss_of(called, *batch))

    return loop


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * factor, x.argmax()

    @staticmethod
    def backward(ctx, gradient, _):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient * ctx.factor, None


def hidden_states_in_the_loss(model, tokens, labels):
    output = model(tokens)
    return cross_entropy(output, labels) + 1e-3 * output["hidden"].float().pow(2).mean()


def custom_function(model, tokens, labels):
    logits = model(tokens)["logits"]
    takes_keywords = torch.__version__ >= (2, 13)
    value, _ = Scaled.apply(logits, factor=0.5) if takes_keywords else Scaled.apply(logits, 0.5)
    return F.dropout(value, 0.2).mean()


def layers_one_by_one(model, tokens, labels):
    x = model.embed(tokens) * 1.5
    x = checkpoint(model.blocks[0], x, use_reentrant=True)
    x = checkpoint(model.blocks[1], x, use_reentrant=False).clone()
    x[:, 0] *= 2
    x += 0.1
    x.mul_(torch.rand(4, 6, 1))
    logits = x @ model.head.weight.t()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-4 * model.head.weight.pow(2).sum()


def in_place(model, tokens, labels):
    labels = labels.clone()
    labels[labels < 5] = -100
    mask = torch.empty(24)
    mask.fill_(1.0)
    mask[3] = 0
    logits = model(tokens)["logits"].flatten(0, 1)
    logits /= 1.3
    chosen = torch.log_softmax(logits, -1).gather(1, labels.flatten().clamp(min=0)[:, None])[:, 0]
    return -(chosen * mask * (labels.flatten() != -100)).sum() / (labels != -100).sum()


def dpo(model, tokens, labels):
    reference = Gpt().eval()

    def log_probability(of, labels):
        return of(tokens)["logits"].log_softmax(-1).gather(-1, labels[..., None])[..., 0].sum(-1)

    with torch.no_grad():
        before = log_probability(reference, labels) - log_probability(reference, labels.flip(0))
    now = log_probability(model, labels) - log_probability(model, labels.flip(0))
    return -F.logsigmoid(0.1 * (now - before)).mean()


def criterion(model, tokens, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(tokens)["logits"].flatten(0, 1), labels.flatten())


def cross_entropy_of(model, tokens, labels):
    return cross_entropy(model(tokens), labels)


def accumulation(watch):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)

    def steps():
        for _ in range(3):
            for _ in range(3):
                tokens, labels = draw()
                with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
                    loss = cross_entropy(model(tokens), labels)
                loss.backward()
            for parameter in model.parameters():
                parameter.grad /= 3.0
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            yield loss

    return model, steps()


def zero_grad_after_forward(watch):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)

    def steps():
        for _ in range(3):
            (tokens, labels), (more, others) = draw(), draw()
            one, other = model(tokens), model(more)
            optimizer.zero_grad()
            cross_entropy(one, labels).backward(retain_graph=True)
            loss = cross_entropy(other, others) + cross_entropy(one, others)
            loss.backward()
            optimizer.step()
            yield loss

    return model, steps()


def generator_and_discriminator(watch):
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
    discriminator = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(8, 1))
    for_generator = torch.optim.Adam(generator.parameters())
    for_discriminator = torch.optim.Adam(discriminator.parameters())
    watch([generator, discriminator], [for_generator, for_discriminator])
    loss_of = nn.BCEWithLogitsLoss()

    def steps():
        for _ in range(3):
            discriminator.zero_grad()
            labels = torch.ones(6, 1)
            loss_of(discriminator(torch.randn(6, 8)), labels).backward()
            images = generator(torch.randn(6, 4))
            loss_of(discriminator(images.detach()), labels.fill_(0.0)).backward()
            for_discriminator.step()
            generator.zero_grad()
            loss = loss_of(discriminator(images), torch.ones(6, 1))
            loss.backward()
            for_generator.step()
            yield loss

    return nn.ModuleList([generator, discriminator]), steps()


def gradient_penalty(watch):
    generator = nn.Linear(4, 8)
    critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    for_generator = torch.optim.Adam(generator.parameters())
    for_critic = torch.optim.Adam(critic.parameters())
    watch({"generator": generator, "critic": critic}, [for_generator, for_critic])

    def steps():
        for _ in range(3):
            real = torch.randn(6, 8)
            images = generator(torch.randn(6, 4)).detach()
            share = torch.rand(6, 1)
            mixed = (share * real + (1 - share) * images).requires_grad_(True)
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = critic(images).mean() - critic(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
            for_generator.zero_grad()
            loss = -critic(generator(torch.randn(6, 4))).mean()
            loss.backward()
            for_generator.step()
            yield loss

    return nn.ModuleList([generator, critic]), steps()


def lbfgs(watch):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    watch(model, optimizer)
    inputs, targets = torch.randn(20, 4), torch.randn(20, 1)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return model, (optimizer.step(closure) for _ in range(2))


class Third(nn.Module):
    """Adds a third in the default dtype."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) + torch.full((4,), 1 / 3)


def another_default_data_type(watch):
    model = Third().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)

    def steps():
        for _ in range(3):
            x = torch.randn(3, 4, dtype=torch.bfloat16)
            torch.set_default_dtype(torch.bfloat16)
            try:
                output = model(x)
            finally:
                torch.set_default_dtype(torch.float32)
            loss = output.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return model, steps()


def frozen_parts(watch):
    model = Gpt()
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    watch(model, optimizer)
    return model, plainly(model, optimizer, lambda *batch: cross_entropy_of(model, *batch))


def loss_scaler(watch):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0)
    watch(model, optimizer)

    def steps():
        for _ in range(3):
            with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
                loss = cross_entropy_of(model, *draw())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield loss

    return model, steps()


def schedulers_and_evaluation(watch):
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    watch(model, optimizer)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def steps():
        for loss in plainly(model, optimizer, lambda *batch: cross_entropy_of(model, *batch)):
            model.eval()
            with torch.no_grad():
                right = 0
                right += (model(draw()[0])["logits"].argmax(-1) == 1).sum()
            model.train()
            before.step()
            after.step()
            yield loss

    return model, steps()


def two_optimizers_of_one_model(watch):
    model = Gpt()
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(parameters[:4], 0.1), torch.optim.Adam(parameters[4:])]
    watch(model, optimizers)

    def steps():
        for _ in range(3):
            loss = cross_entropy_of(model, *draw())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield loss

    return model, steps()


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


LOOPS = {
    "cross_entropy": with_loss(cross_entropy_of),
    "hidden_states_in_the_loss": with_loss(hidden_states_in_the_loss),
    "criterion": with_loss(criterion),
    "custom_function": with_loss(custom_function),
    "layers_one_by_one": with_loss(layers_one_by_one),
    "in_place": with_loss(in_place),
    "dpo": with_loss(dpo),
    "checkpoint_reentrant": with_loss(cross_entropy_of, lambda: Gpt(use_reentrant=True)),
    "checkpoint": with_loss(cross_entropy_of, lambda: Gpt(use_reentrant=False)),
    "compiled": with_loss(cross_entropy_of, compiled=lambda m: torch.compile(m, backend="eager")),
    "compiled_in_place": with_loss(cross_entropy_of, compiled=compiled_in_place),
    "accumulation": accumulation,
    "zero_grad_after_forward": zero_grad_after_forward,
    "generator_and_discriminator": generator_and_discriminator,
    "gradient_penalty": gradient_penalty,
    "lbfgs": lbfgs,
    "another_default_data_type": another_default_data_type,
    "frozen_parts": frozen_parts,
    "loss_scaler": loss_scaler,
    "schedulers_and_evaluation": schedulers_and_evaluation,
    "two_optimizers_of_one_model": two_optimizers_of_one_model,
}
