"""Published training configurations: model, layout of ranks, and step time.

Shapes of Llama 3: "The Llama 3 Herd of Models" (arXiv 2407.21783, table 3); Mixtral 8x22B: config.json.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Configuration:
    name: str
    # the model
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int
    # the layout
    ranks: int
    tp: int
    pp: int
    microbatches: int  # of one sequence, per step and data-parallel rank
    vp: int | None = None  # model chunks per pipeline stage
    ep: int = 1
    experts: int | None = None
    topk: int = 2
    is_embedding_a_layer: bool = False  # first and last stage have one layer less
    # what was published
    step_seconds: float = 0.0
    source: str = ""

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.pp)

    @property
    def layout(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}", f"DP{self.dp}"]
        if self.vp:
            parts.insert(2, f"VP{self.vp}")
        if self.experts:
            parts.append(f"EP{self.ep}")
        return " ".join(parts)

    def stage_of_rank(self, stage: int) -> int:
        """The first rank of a pipeline stage; Megatron's order of ranks is tp-cp-ep-dp-pp."""
        return stage * self.ranks // self.pp


def _seconds_by_tokens(configuration: Configuration, tokens_per_second_and_gpu: float) -> float:
    tokens = configuration.dp * configuration.microbatches * configuration.sequence
    return tokens / configuration.ranks / tokens_per_second_and_gpu


def _seconds_by_flops(configuration: Configuration, flops_per_second: float, parameters: float) -> float:
    """6 floating-point operations per active parameter and token, and 12 layers hidden sequence of them for
    attention, halved because it is causal, as both papers count."""
    c = configuration
    per_token = 6 * parameters + 6 * c.layers * c.hidden * c.sequence
    return c.dp * c.microbatches * c.sequence * per_token / c.ranks / flops_per_second


def _published() -> list[Configuration]:
    bridge = "Megatron-Bridge docs/performance-summary.md, 25.11, DGX-H100, FP8"
    llama_8b = Configuration(
        "Llama-3 8B", 32, 4096, 14336, 32, 8, 128256, 8192, ranks=8, tp=1, pp=1, microbatches=16
    )
    llama_70b = Configuration(
        "Llama-3 70B", 80, 8192, 28672, 64, 8, 128256, 8192, ranks=64, tp=4, pp=8, vp=5, microbatches=64
    )
    # A layout with which Megatron trains 70B at larger scale; its step time follows from the
    # published throughput.
    llama_70b_tp8 = dataclasses.replace(llama_70b, tp=8, ranks=1024, vp=None, microbatches=64)
    llama_405b = Configuration(
        "Llama-3 405B",
        126,
        16384,
        53248,
        128,
        8,
        128256,
        8192,
        ranks=16384,
        tp=8,
        pp=16,
        microbatches=16,
        is_embedding_a_layer=True,
    )
    mixtral = Configuration(
        "Mixtral 8x22B",
        56,
        6144,
        16384,
        48,
        8,
        32768,
        4096,
        ranks=128,
        tp=4,
        pp=8,
        vp=7,
        ep=2,
        experts=8,
        microbatches=64,
    )
    paper = "arXiv 2407.21783, table 4"
    return [
        dataclasses.replace(
            llama_8b,
            step_seconds=_seconds_by_tokens(llama_8b, 14451),
            source=f"{bridge}: 14,451 tokens/s/GPU",
        ),
        dataclasses.replace(
            llama_70b,
            step_seconds=_seconds_by_tokens(llama_70b, 1602),
            source=f"{bridge}: 1,602 tokens/s/GPU",
        ),
        dataclasses.replace(
            llama_70b_tp8,
            name="Llama-3 70B, TP8",
            step_seconds=_seconds_by_flops(llama_70b_tp8, 430e12, 70.6e9),
            source=f"430 TFLOP/s/GPU, as {paper} has for 405B",
        ),
        dataclasses.replace(
            llama_405b,
            step_seconds=_seconds_by_flops(llama_405b, 400e12, 405.9e9),
            source=f"{paper}: 400 TFLOP/s/GPU",
        ),
        dataclasses.replace(
            mixtral,
            step_seconds=_seconds_by_flops(mixtral, 0.493 * 989e12, 39.1e9),
            source="arXiv 2504.14960: 49.3 % of 989 TFLOP/s; layout: Megatron-Core's moe/README.md",
        ),
    ]


CONFIGURATIONS = _published()

# Two gloo ranks train it in a second: the counts on the meta device must equal the measurements on them.
SMALL = Configuration(
    "small", 4, 64, 128, 4, 2, 256, 32, ranks=2, tp=2, pp=1, microbatches=2, step_seconds=1.0, source="none"
)
SMALL_PIPELINE = dataclasses.replace(SMALL, name="small pipeline", tp=1, pp=2, microbatches=4)
SMALL_EXPERTS = dataclasses.replace(SMALL, name="small experts", tp=1, ep=2, experts=4)
