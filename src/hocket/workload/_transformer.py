"""Workloads of transformer language models from their shape alone, in the notation of Megatron-LM.

FLOPs: Narayanan et al., SC'21 (arXiv:2104.04473). Activations: Korthikanti et al. 2022 (arXiv:2205.05198), section 4,
whose sum of a layer is s b h (34 + 5 a s / h) bytes at 16 bits. What each operation reads and writes is counted for
kernels fused as in those papers: bias with GeLU, bias with dropout and residual, scale with mask and softmax.
"""

from functools import partial
from typing import Any

from ._share import Operation, WorkloadError
from ._workload import Layer, Workload

# Hidden size, layers, heads. The 1.7B to 1T of Narayanan et al., table 1; 22B, 175B and "1008B" of Korthikanti et al.,
# table 3; 7B: the usual shape of that size.
SHAPES: dict[str, tuple[int, int, int]] = {
    "1.7b": (2304, 24, 24),
    "3.6b": (3072, 30, 32),
    "7b": (4096, 32, 32),
    "7.5b": (4096, 36, 32),
    "18.4b": (6144, 40, 48),
    "22b": (6144, 48, 64),
    "39.1b": (8192, 48, 64),
    "76.1b": (10240, 60, 80),
    "145.6b": (12288, 80, 96),
    "175b": (12288, 96, 96),
    "310.1b": (16384, 96, 128),
    "529.6b": (20480, 105, 128),
    "1008b": (25600, 128, 160),
}

# Hidden size, layers, heads, key-value heads, feed-forward width: Llama team 2024 (arXiv:2407.21783), table 3.
LLAMAS: dict[str, tuple[int, int, int, int, int]] = {
    "8b": (4096, 32, 32, 8, 14336),
    "70b": (8192, 80, 64, 8, 28672),
    "405b": (16384, 126, 128, 8, 53248),
}

# The same, with vocabulary, experts, and how many of them a token takes: Jiang et al. 2024 (arXiv:2401.04088), table 1,
# and the published configuration of the larger one.
MIXTRALS: dict[str, tuple[int, int, int, int, int, int, int, int]] = {
    "8x7b": (4096, 32, 32, 8, 14336, 32000, 8, 2),
    "8x22b": (6144, 56, 48, 8, 16384, 32768, 8, 2),
}

# Far beyond any model; plans of more layers are searched for minutes.
_MOST_LAYERS, _MOST = 10_000, 10**9


def named_transformer(name: str, *, batch: int = 1, **more: Any) -> Workload:
    """One of `SHAPES`, written "gpt-22b" or "22b", of `LLAMAS`, as "llama-3-8b", or of `MIXTRALS`, as "mixtral-8x7b".

    Args:
        name: Of the model.
        batch: Samples that activations and FLOPs are given for.
        more: Instead of its own: `sequence`, `vocabulary`; and of the latter two `eager`.

    Raises:
        WorkloadError: there is none of this name, or a size is none.
    """
    if (key := name.lower().removeprefix("llama-3-")) in LLAMAS and name.lower().startswith("llama-3-"):
        return llama(*LLAMAS[key], name=f"llama-3-{key}", batch=batch, **more)
    if (key := name.lower().removeprefix("mixtral-")) in MIXTRALS and name.lower().startswith("mixtral-"):
        *sizes, vocabulary, experts, active = MIXTRALS[key]
        more = {"vocabulary": vocabulary, "experts": experts, "active": active, "sequence": 4096, **more}
        return llama(*sizes, name=f"mixtral-{key}", batch=batch, **more)
    key = name.lower().removeprefix("gpt-").removeprefix("lm-")
    key = "1008b" if key == "1t" else key  # its authors call it both
    if key not in SHAPES:
        named = (("gpt", SHAPES), ("llama-3", LLAMAS), ("mixtral", MIXTRALS))
        known = ", ".join(f"{kind}-{one}" for kind, table in named for one in table)
        raise WorkloadError(f"there is no transformer {name!r}; there are {known}")
    hidden, layers, heads = SHAPES[key]
    return transformer(hidden, layers, heads, name=f"gpt-{key}", batch=batch, **more)


def transformer(
    hidden: int,
    layers: int,
    heads: int,
    *,
    vocabulary: int = 51200,
    sequence: int = 2048,
    batch: int = 1,
    name: str = "",
    gradient_nbytes: int = 4,
    optimizer_nbytes: int = 12,
    parameter_nbytes: int = 2,
) -> Workload:
    """Return a decoder-only transformer with learnt positions and an output matrix that is the embedding's.

    Args:
        hidden: h, channels between the layers.
        layers: How many.
        heads: a, attention heads of each.
        vocabulary: V.
        sequence: s, tokens of a sample.
        batch: b, samples that activations and FLOPs are given for.
        name: Of the workload.
        gradient_nbytes: Of a parameter's gradient: 4 where gradients are accumulated in full precision (Megatron-LM),
            2 as in the accounting of ZeRO.
        optimizer_nbytes: Of a parameter's optimizer state: Adam's two moments and the parameter in full precision.
        parameter_nbytes: Of a parameter.

    Raises:
        WorkloadError: a size is 0 or less or larger than any model's, or the heads do not divide the hidden size.
    """
    _check(hidden=hidden, layers=layers, heads=heads, vocabulary=vocabulary, sequence=sequence)
    if hidden % heads:
        raise WorkloadError(f"{heads} heads do not divide a hidden size of {hidden}; choose a divisor")
    tokens = batch * sequence
    wide = float(tokens * hidden)  # s b h
    square = float(heads * batch) * sequence**2  # a s^2 b

    nbytes = parameter_nbytes, gradient_nbytes, optimizer_nbytes
    layer = partial(_layer, nbytes=nbytes, output_bytes=2 * wide, limit=heads)
    block = _block(float(tokens), hidden, wide, square, sequence)
    count = 12 * hidden**2 + 13 * hidden
    embedding = (Operation("embed", moved_bytes=5 * wide, saved_bytes=wide, part="shared", calls=2),)
    logits = float(tokens) * vocabulary
    head = (
        Operation("final norm", moved_bytes=4 * wide, saved_bytes=2 * wide),
        Operation("logits", 2 * logits * hidden, 2 * (wide + logits + hidden * vocabulary), 2 * wide, "divided"),
        Operation("loss", moved_bytes=12 * logits, saved_bytes=4 * logits, part="divided", calls=4),
    )
    return Workload(
        name or f"transformer-h{hidden}-l{layers}-a{heads}",
        batch,
        (
            layer("embedding", "embedding", (vocabulary + sequence) * hidden, embedding, 1),
            *(layer(f"block{index}", "transformer", count, block, 2) for index in range(layers)),
            layer("head", "head", 2 * hidden, head, 1),
        ),
        precision="bfloat16",
        source="analytic",
        unit="sequence",
    )


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        most = _MOST_LAYERS if name == "layers" else _MOST
        if not 1 <= size <= most:
            raise WorkloadError(f"a transformer with {name} = {size:,}; give 1 to {most:,}")


def _layer(
    label: str, kind: str, count: int, operations: tuple[Operation, ...], reductions: int, *,
    nbytes: tuple[int, int, int], output_bytes: float, limit: int,
) -> Layer:  # fmt: skip
    """Return a layer of `count` parameters, each with `nbytes` of its own, of its gradient and its optimizer state."""
    parameter, gradient, state = (count * each for each in nbytes)
    return Layer(
        label, kind, count, parameter, gradient, state, output_bytes, operations,
        tensor_limit=limit, reductions=reductions, reduced_bytes=output_bytes if reductions else 0.0,
    )  # fmt: skip


def _block(tokens: float, hidden: int, wide: float, square: float, sequence: int) -> tuple[Operation, ...]:
    """Return a layer's operations; saved bytes sum to s b h (34 + 5 a s / h), FLOPs to 24 s b h^2 (1 + s / (6 h))."""

    def product(name: str, inputs: int, outputs: int, saved: float) -> Operation:
        flops = 2 * tokens * inputs * outputs
        moved = 2 * (tokens * (inputs + outputs) + inputs * outputs)
        return Operation(name, flops, moved, saved, "divided", weight_bytes=2.0 * inputs * outputs)

    scores = 2 * tokens * sequence * hidden  # FLOPs of one of the two products with s x s matrices
    return (
        Operation("attention norm", moved_bytes=4 * wide, saved_bytes=2 * wide),
        # The input that all three projections share is saved once per rank; it is the part that is not divided.
        Operation("projection input", saved_bytes=2 * wide, calls=0),
        product("query, key, value", hidden, 3 * hidden, 4 * wide),  # saved: Q and K; V is of the second product
        Operation("scores", scores, 4 * wide + 2 * square, 0.0, "core"),
        Operation("softmax", moved_bytes=4 * square, saved_bytes=2 * square, part="core"),
        Operation("attention dropout", moved_bytes=5 * square, saved_bytes=3 * square, part="core"),
        Operation("values", scores, 4 * wide + 2 * square, 2 * wide, "divided"),
        product("attention output", hidden, hidden, 2 * wide),
        Operation("attention residual", moved_bytes=7 * wide, saved_bytes=wide),
        Operation("feed-forward norm", moved_bytes=4 * wide, saved_bytes=2 * wide),
        Operation("feed-forward input", saved_bytes=2 * wide, calls=0),
        product("feed-forward in", hidden, 4 * hidden, 0.0),
        Operation("gelu", moved_bytes=16 * wide, saved_bytes=8 * wide, part="divided"),
        product("feed-forward out", 4 * hidden, hidden, 8 * wide),
        Operation("feed-forward residual", moved_bytes=7 * wide, saved_bytes=wide),
    )


def llama(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    *,
    vocabulary: int = 128256,
    sequence: int = 8192,
    experts: int = 1,
    active: int = 1,
    eager: bool = False,
    batch: int = 1,
    name: str = "",
    gradient_nbytes: int = 4,
    optimizer_nbytes: int = 10,
    parameter_nbytes: int = 2,
) -> Workload:
    """Return a decoder-only transformer as they are since 2023: fused attention, grouped keys and values, SwiGLU.

    Rotary positions, RMS norms, no dropout, an output matrix of its own; products in bfloat16. Attention is counted as
    if it were not causal, as MFU is usually given.

    A norm is one kernel here, as are rotary positions of queries and of keys; a residual is added by a kernel of its
    own, and SwiGLU takes two. `eager` counts what PyTorch launches for the formulas as they stand in the model's code:
    norms and rotary positions compute in 32 bits with a kernel for every operator, which reads and writes 9 times and 5
    times as much, and keys and values are copied for the heads that share them. torch.compile makes of these kernels
    about the former: `fused_share` of the planner's constants.

    With several experts, every rank has all of them, or its part of each where parameters are sharded or tensors
    divided; there is no expert parallelism. Tokens are spread evenly and none is dropped, and the products of all
    experts are one kernel. MFU counts what the active experts compute.

    Args:
        hidden: h, channels between the layers.
        layers: How many.
        heads: a, of queries.
        kv_heads: Of keys and values; heads share them in groups of equal size.
        feed_forward: Width of the gated feed-forward network.
        vocabulary: V.
        sequence: s, tokens of a sample.
        experts: Feed-forward networks of a layer, among which a router chooses; 1 for none to choose.
        active: How many of them each token takes.
        eager: Whether norms and rotary positions are the kernels of PyTorch's operators, one by one.
        batch: b, samples that activations and FLOPs are given for.
        name: Of the workload.
        gradient_nbytes: Of a parameter's gradient: 32 bits, as FSDP2 with mixed precision reduces it.
        optimizer_nbytes: Of a parameter's optimizer state: Adam's two moments, and the half of the parameter in 32 bits
            that is never sent.
        parameter_nbytes: Of a parameter as it is gathered and computed with, in 16 bits.

    Raises:
        WorkloadError: a size is 0 or less or larger than any model's, the heads do not divide the hidden size, or the
            key-value heads the heads.
    """
    more = {"kv_heads": kv_heads, "feed_forward": feed_forward, "vocabulary": vocabulary, "sequence": sequence}
    _check(hidden=hidden, layers=layers, heads=heads, **more)
    if hidden % heads or heads % kv_heads:
        raise WorkloadError(
            f"{heads} heads, {kv_heads} for keys and values, do not divide a hidden size of {hidden}; choose divisors"
        )
    if not 1 <= active <= experts:
        raise WorkloadError(
            f"a token cannot take {active} of {experts} experts; give 1 or more, and no more than there are"
        )
    tokens = float(batch * sequence)
    wide, kv, inner = tokens * hidden, tokens * hidden * kv_heads / heads, tokens * active * feed_forward

    def product(label: str, inputs: int, outputs: int, saved: float, rows: int = 1, kinds: int = 1) -> Operation:
        moved = 2 * (rows * tokens * (inputs + outputs) + kinds * inputs * outputs)
        weights = 2.0 * kinds * inputs * outputs
        return Operation(label, 2 * rows * tokens * inputs * outputs, moved, saved, "divided", weight_bytes=weights)

    def norm(label: str) -> tuple[Operation, ...]:
        if not eager:
            return (Operation(label, moved_bytes=4 * wide, saved_bytes=2 * wide),)
        # To 32 bits, squares, mean, by the root, to 16 bits, by the weights: 6 + 8 + 4 + 8 + 6 + 4 bytes.
        return (
            Operation(f"{label} input", saved_bytes=2 * wide, calls=0),
            Operation(label, moved_bytes=36 * wide, saved_bytes=6 * wide, part="repeated", calls=8),
        )

    nbytes = parameter_nbytes, gradient_nbytes, optimizer_nbytes
    layer = partial(_layer, nbytes=nbytes, output_bytes=2 * wide, limit=kv_heads)
    group = hidden * kv_heads // heads
    scores = tokens * experts  # in 32 bits, as their softmax
    routed = (
        Operation("router", 2 * scores * hidden, 2 * (wide + hidden * experts) + 16 * scores, 8 * scores, calls=3),
        # Tokens are copied in the order of their experts, and come back weighted and summed.
        Operation("dispatch", moved_bytes=4 * active * wide, saved_bytes=2 * active * wide, part="shared"),
        Operation("combine", moved_bytes=2 * (active + 1) * wide, saved_bytes=2 * active * wide, part="shared"),
    )[: 3 * (experts > 1)]
    positions: tuple[Operation, ...] = (
        Operation("rotary positions", moved_bytes=4 * (wide + kv), part="divided", calls=2),
    )
    if eager:
        positions = (  # to 32 bits, turned, to 16 bits: 6 + 8 + 6 bytes
            Operation("rotary positions", moved_bytes=20 * (wide + kv), part="core", calls=6),
            Operation(
                "copies for heads", moved_bytes=4 * (wide + kv), saved_bytes=4 * (wide - kv), part="core", calls=2
            ),
        )[: 2 if kv_heads < heads else 1]
    block = (
        *norm("attention norm"),
        Operation("projection input", saved_bytes=2 * wide, calls=0),
        product("query, key, value", hidden, hidden + 2 * group, 0.0),
        *positions,
        # Queries, keys and values, the output, and a sum of exponentials for every row are kept; scores never exist.
        Operation(
            "attention", 4 * tokens * sequence * hidden, 4 * (wide + kv),
            4 * wide + 4 * kv + 4 * tokens * heads, "divided",
        ),
        product("attention output", hidden, hidden, 0.0),
        Operation("attention residual", moved_bytes=6 * wide),
        *norm("feed-forward norm"),
        Operation("feed-forward input", saved_bytes=2 * wide, calls=0),
        *routed[:2],
        product("gate and up", hidden, 2 * feed_forward, 4 * inner, active, experts),
        # What selective recomputation does again: it is large, and takes hardly any arithmetic.
        Operation("swiglu", moved_bytes=10 * inner, saved_bytes=4 * inner, part="core", calls=2),
        product("down", feed_forward, hidden, 0.0, active, experts),
        *routed[2:],
        Operation("feed-forward residual", moved_bytes=6 * wide),
    )  # fmt: skip
    logits = tokens * vocabulary
    head = (
        *norm("final norm"),
        Operation("logits", 2 * logits * hidden, 2 * (wide + logits + hidden * vocabulary), 2 * wide, "divided"),
        Operation("loss", moved_bytes=12 * logits, saved_bytes=6 * logits, part="divided", calls=4),
    )
    count = hidden * (2 * hidden + 2 * group) + 3 * hidden * feed_forward * experts + 2 * hidden
    count += hidden * experts if experts > 1 else 0
    embedding = (Operation("embed", moved_bytes=4 * wide, part="shared"),)
    return Workload(
        name or f"llama-h{hidden}-l{layers}-a{heads}" + (f"-e{experts}" if experts > 1 else ""),
        batch,
        (
            layer("embedding", "embedding", vocabulary * hidden, embedding, 1),
            *(layer(f"block{index}", "transformer", count, block, 2) for index in range(layers)),
            layer("head", "head", vocabulary * hidden + hidden, head, 1),
        ),
        precision="bfloat16",
        source="analytic",
        unit="sequence",
    )
