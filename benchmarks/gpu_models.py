"""Models of other kinds than `benchmarks.gpu` has at first: recurrent, depthwise, of volumes, experts, long sequences.

They were written, and predicted, before any of them had run on a GPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from torch.utils.checkpoint import checkpoint


class Recurrent(nn.Module):
    """A language model of stacked LSTMs or GRUs: (N, T) tokens to (N, T, vocabulary) scores."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.rnn = kind(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x))[0])


class ConvNextBlock(nn.Module):
    """A depthwise 7 x 7 convolution, layer norm over channels and a perceptron (Liu et al. 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.scale * self.inner(self.depthwise(x).permute(0, 2, 3, 1))
        return x + inner.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """(N, 3, H, W) pictures to (N, classes) scores, in four stages."""

    def __init__(self, widths: tuple[int, ...], depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width, depth in zip(widths, depths, strict=True):
            fold = 4 if before == 3 else 2
            layers += [nn.Conv2d(before, width, fold, fold), *(ConvNextBlock(width) for _ in range(depth))]
            before = width
        self.body, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(before), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV2 (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, grow: int) -> None:
        super().__init__()
        inner = grow * inputs
        self.same = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6()),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            *(nn.BatchNorm2d(inner), nn.ReLU6()),
            *(nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


def mobile(plan: tuple[tuple[int, int, int], ...], classes: int) -> nn.Module:
    """MobileNetV2 whose groups of blocks have (channels, blocks, stride)."""
    first = 32
    layers: list[nn.Module] = [nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU6()]
    for outputs, blocks, stride in plan:
        for number in range(blocks):
            layers.append(Inverted(first, outputs, stride if number == 0 else 1, 6))
            first = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(first, classes))


class _Residual(nn.Module):
    """Of a denoising U-Net: group norm, SiLU and convolutions, moved by the time's embedding."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.a, self.b = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.skip = nn.Linear(time, outputs), nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.a(silu(self.first(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.b(silu(self.second(h)))


class _Attention(nn.Module):
    """Of all places of a picture to all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(8, width), heads
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.heads, -1)).transpose(-1, -2).unbind(1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-1, -2).flatten(1, 2).unflatten(2, x.shape[2:]))


class Denoiser(nn.Module):
    """A U-Net that tells noise from a picture and a time (Ho et al. 2020)."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        time, self.time = 4 * width, nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, 4 * width))
        widths = [width * min(4, 2**level) for level in range(levels)]
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(_Residual(a, b, time) for a, b in zip([width, *widths[:-1]], widths, strict=True))
        self.middle, self.attention = _Residual(widths[-1], widths[-1], time), _Attention(widths[-1], 4)
        self.up = nn.ModuleList(_Residual(2 * b, a, time) for a, b in zip([width, *widths[:-1]], widths, strict=True))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h, t = self.first(x), self.time(time)
        kept = []
        for block in self.down:
            h = block(h, t)
            kept.append(h)
            h = nn.functional.avg_pool2d(h, 2)
        h = self.attention(self.middle(h, t))
        for block in reversed(self.up):
            skip = kept.pop()
            h = block(torch.cat([nn.functional.interpolate(h, scale_factor=2.0), skip], 1), t)
        return self.last(h)


class Experts(nn.Module):
    """A language model whose perceptrons are experts of a fixed capacity (Fedus et al. 2021), found by einsum."""

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int, experts: int) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.router = nn.Linear(width, experts)
            self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * 0.02)
            self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * 0.02)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norms[0](x)
            x = x + self.attention(h, h, h, need_weights=False)[0]
            h = self.norms[1](x).flatten(0, 1)
            score = self.router(h).softmax(-1)  # each expert takes its best tokens, as in Zhou et al. 2022
            weight, places = score.t().topk(h.shape[0] // score.shape[1])
            taken = h[places.flatten()].unflatten(0, places.shape)
            done = torch.bmm(nn.functional.gelu(torch.bmm(taken, self.up)), self.down) * weight[..., None]
            out = torch.zeros_like(h).index_add(0, places.flatten(), done.flatten(0, 1).to(h.dtype))
            return x + out.unflatten(0, x.shape[:2])

    def __init__(self, width: int, layers: int, heads: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(self.Layer(width, heads, experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recomputed(nn.Module):
    """A model whose `blocks` keep nothing for the backward pass but their inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        blocks = model.blocks
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Translator(nn.Module):
    """torch's own encoder and decoder, with dropout."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.body = nn.Transformer(width, heads, layers, layers, 4 * width, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        return self.head(self.body(x, x))


def steps(width: int, layers: int) -> nn.Module:
    """Many small layers, each over in some microseconds: a step that waits for its host."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())))


def noise_of(batch: int, size: int) -> Callable[[torch.device, torch.dtype], Any]:
    """Pictures, times and noise."""

    def sample(device: torch.device, dtype: torch.dtype) -> Any:
        make = partial(torch.randn, device=device, dtype=dtype)
        return make(batch, 3, size, size), torch.rand(batch, 1, device=device, dtype=dtype), make(batch, 3, size, size)

    return sample


def tell_noise(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0], batch[1]) - batch[2]).float().square().mean()


def maps_of(batch: int, channels: int, size: int, classes: int) -> Callable[[torch.device, torch.dtype], Any]:
    """Maps and a class for each of their pixels."""

    def sample(device: torch.device, dtype: torch.dtype) -> Any:
        x = torch.randn(batch, channels, size, size, device=device, dtype=dtype)
        return x, torch.zeros(batch, size, size, dtype=torch.long, device=device) + torch.arange(
            size, device=device
        ) % classes

    return sample


def of_pixels(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]).float(), batch[1])


def volumes_of(batch: int, channels: int, size: int) -> Callable[[torch.device, torch.dtype], Any]:
    """Volumes and four numbers of each."""

    def sample(device: torch.device, dtype: torch.dtype) -> Any:
        make = partial(torch.randn, device=device, dtype=dtype)
        return make(batch, channels, size, size, size), make(batch, 4)

    return sample


def squared(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).float().square().mean()


class Grouped(nn.Module):
    """ResNeXt's bottlenecks (Xie et al. 2017): convolutions in 32 groups, batch norm; (N, 3, H, W) to (N, classes)."""

    class Block(nn.Module):
        def __init__(self, inputs: int, inner: int, outputs: int, stride: int, groups: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
                nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False),
                *(nn.BatchNorm2d(inner), nn.ReLU(), nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
            )
            self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.body(x) + self.skip(x))

    def __init__(self, width: int, depths: tuple[int, ...], groups: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
        for level, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if number == 0 else 1
                layers.append(self.Block(before, 2 * width << level, 4 * width << level, stride, groups))
                before = 4 * width << level
        self.body, self.head = nn.Sequential(*layers), nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Dense(nn.Module):
    """DenseNet's blocks (Huang et al. 2017): what each layer makes is joined to what it was given."""

    def __init__(self, grow: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        width = 2 * grow
        self.first = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.blocks, self.turns = nn.ModuleList(), nn.ModuleList()
        for depth in depths:
            layers = nn.ModuleList()
            for _ in range(depth):
                inner = (nn.Conv2d(width, 4 * grow, 1, bias=False), nn.BatchNorm2d(4 * grow), nn.ReLU())
                last = nn.Conv2d(4 * grow, grow, 3, padding=1, bias=False)
                layers.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), *inner, last))
                width += grow
            self.blocks.append(layers)
            self.turns.append(nn.Sequential(nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)))
            width //= 2
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.first(x), 2)
        for layers, turn in zip(self.blocks, self.turns, strict=True):
            for layer in layers:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = turn(x)
        return self.head(x.mean((2, 3)))


class Windows(nn.Module):
    """Attention within windows of a picture that move by half (Liu et al. 2021), scores with a bias, without fusing."""

    class Layer(nn.Module):
        def __init__(self, width: int, heads: int, window: int, shift: int) -> None:
            super().__init__()
            self.heads, self.window, self.shift = heads, window, shift
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
            self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            n, size, _, width = x.shape
            w, count = self.window, size // self.window
            h = self.norms[0](x).roll((-self.shift, -self.shift), (1, 2))
            h = h.view(n, count, w, count, w, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, width)
            q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(h).chunk(3, -1))
            score = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias).softmax(-1)
            h = self.out((score @ v).transpose(1, 2).flatten(2))
            h = h.view(n, count, count, w, w, width).permute(0, 1, 3, 2, 4, 5).reshape(n, size, size, width)
            x = x + h.roll((self.shift, self.shift), (1, 2))
            return x + self.inner(self.norms[1](x))

    def __init__(self, width: int, layers: int, heads: int, window: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.Sequential(
            *(self.Layer(width, heads, window, (number % 2) * (window // 2)) for number in range(layers))
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))


class Waves(nn.Module):
    """Convolutions over sound, and an encoder behind them (Baevski et al. 2020): (N, 1, samples) to (N, classes)."""

    def __init__(self, width: int, layers: int, heads: int, encoders: int, classes: int) -> None:
        super().__init__()
        rows: list[nn.Module] = []
        for number in range(layers):
            inputs, kernel, stride = (1, 10, 5) if number == 0 else (width, 3, 2)
            rows += [nn.Conv1d(inputs, width, kernel, stride), nn.GroupNorm(8, width), nn.GELU()]
        self.body = nn.Sequential(*rows)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, encoders), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.body(x).transpose(1, 2)).mean(1))


class Volumes(nn.Module):
    """A U-Net of volumes with instance norm (Isensee et al. 2021): (N, 1, D, H, W) to (N, 4)."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()

        def twice(a: int, b: int) -> nn.Module:
            rows = [(nn.Conv3d(x, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU()) for x in (a, b)]
            return nn.Sequential(*rows[0], *rows[1])

        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(twice(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(twice(3 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool3d(x, 2))
            kept.append(x)
        kept.pop()
        for block in self.up:
            x = block(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], 1))
        return self.head(x.mean((2, 3, 4)))


class Messages(nn.Module):
    """Sums of messages along a graph's edges, layer by layer: (N nodes, width) to (N, classes)."""

    def __init__(self, width: int, layers: int, edges: int, classes: int) -> None:
        super().__init__()
        self.edges = edges
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        nodes = x.shape[0]
        to = torch.arange(nodes * self.edges, device=x.device)
        sender, receiver = to * 7919 % nodes, to % nodes
        for layer in self.layers:
            sent = layer(torch.cat([x[sender], x[receiver]], -1))
            x = x + torch.zeros_like(x).index_add(0, receiver, sent.to(x.dtype))
        return self.head(x)


class Mixed(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    class Layer(nn.Module):
        def __init__(self, width: int, places: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.across = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
            self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.inner(self.norms[1](x))

    def __init__(self, width: int, layers: int, size: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.layers = nn.Sequential(*(self.Layer(width, (size // patch) ** 2) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
