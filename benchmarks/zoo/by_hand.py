"""Models that people write by hand: nothing in them is made for parallelism, and some of it is against it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from .entries import add, classes, next_token, numbers, pictures, sentences, squares, words

# --- language models ------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int = 32, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention or CausalSelfAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, block: type[nn.Module] = Block, again: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.again = again
        self.wte, self.wpe = nn.Embedding(96, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList(block() for _ in range(2))
        self.ln_f = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 96, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)  # type: ignore[assignment]
        return self.lm_head(self.ln_f(x))


class EinopsAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=4)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(8)
        ahead = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        return self.out(rearrange(weights @ v, "b h n d -> b n (h d)"))


class EinopsPicture(nn.Module):
    """A vision transformer that calls einops in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cls = nn.Linear(3 * 8 * 8, 32), nn.Parameter(torch.randn(1, 1, 32) * 0.1)
        self.blocks = nn.Sequential(*[Block(32, EinopsAttention()) for _ in range(2)])
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=8, q=8))
        x = torch.cat([repeat(self.cls, "1 1 d -> b 1 d", b=x.shape[0]), x], 1)
        return self.head(self.blocks(x)[:, 0])


class EncoderLM(nn.Module):
    def __init__(self, norm_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.transformer(self.embed(ids.flip(1)), self.embed(ids), tgt_mask=mask))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **own: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.rnn = kind(32, 32, batch_first=True, **own)
        self.head = nn.Linear(64 if own.get("bidirectional") else 32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(96, 32), nn.LSTMCell(32, 32), nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        h = c = x.new_zeros(x.shape[0], 32)
        out = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            out.append(h)
        return self.head(torch.stack(out, 1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = nn.Embedding(96, 32), nn.GRU(32, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = (ids[:, 1:] > 20).sum(1) + 1
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=ids.shape[1])
        return self.head(out.sum(1) / lengths[:, None])


class Experts(nn.Module):
    """A mixture of experts that routes by a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


class ExpertBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Experts()  # type: ignore[assignment]


class ALiBi(CausalSelfAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.c_attn(x).chunk(3, -1))
        slopes = torch.tensor([2.0 ** -(i + 1) for i in range(self.heads)])
        far = (torch.arange(t)[None, :] - torch.arange(t)[:, None]).float()
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + slopes[:, None, None] * far
        scores = scores + torch.full((t, t), -torch.inf).triu(1)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class ALiBiBlock(Block):
    def __init__(self) -> None:
        super().__init__(attention=ALiBi())


class WithLoss(nn.Module):
    """nanoGPT that is given its targets and returns logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = NanoGPT()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> Any:
        logits = self.inner(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids_twice(samples: int, generator: torch.Generator) -> Any:
    ids, targets = words()(samples, generator)
    return ids, targets, targets


add("nanoGPT", "by hand", NanoGPT, words(), next_token)
add("nanoGPT, loss inside", "by hand", WithLoss, ids_twice, lambda output, _: output[1])
add("checkpoint() inside", "by hand", lambda: NanoGPT(again=True), words(), next_token)
add("ALiBi", "by hand", lambda: NanoGPT(ALiBiBlock, tied=False), words(), next_token)
add("experts in a loop", "by hand", lambda: NanoGPT(ExpertBlock), words(), next_token)
add("einops attention", "by hand", EinopsPicture, pictures(), classes)
add("nn.TransformerEncoder", "by hand", EncoderLM, words(), next_token)
add("nn.Transformer", "by hand", Translator, words(), next_token)
add("LSTM", "by hand", lambda: Recurrent(nn.LSTM, num_layers=2), words(), next_token)
add("GRU, both directions", "by hand", lambda: Recurrent(nn.GRU, bidirectional=True), words(), next_token)
add("RNN", "by hand", lambda: Recurrent(nn.RNN), words(), next_token)
add("LSTMCell in a loop", "by hand", CellLoop, words(), next_token)
add("GRU over PackedSequence", "by hand", Packed, sentences(10), classes)

# --- pictures, sound, points ----------------------------------------------------------------------------------------


def conv(a: int, b: int, norm: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b) if norm else nn.GroupNorm(4, b), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8, norm), conv(8, 16, norm), conv(16, 32, norm)
        self.up1, self.d = nn.ConvTranspose2d(32, 16, 2, 2), conv(32, 16, norm)
        self.up2, self.e = nn.ConvTranspose2d(16, 8, 2, 2), conv(16, 8, norm)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up1(c), b], 1))
        return self.out(self.e(torch.cat([self.up2(d), a], 1)))


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv1d(1, 16, 1), nn.Conv1d(16, 1, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.start(x), 0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**i, 0))).chunk(2, 1)
            h = mix(torch.tanh(a) * torch.sigmoid(b))
            x, skips = x + h, skips + h
        return self.end(F.relu(skips))  # type: ignore[arg-type]


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.points(x).amax(-1))


class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.sin(5 * layer(x))
        return self.layers[-1](x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 32))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3 * 16 * 16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return {"picture": self.decoder(mean).view_as(x), "mean": mean, "log_variance": log_variance}


def elbo(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    mean, log_variance = output["mean"], output["log_variance"]
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
    return F.mse_loss(output["picture"], target) + 1e-3 * divergence


class NeuralODE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(9, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for t in torch.linspace(0, 1, 5):
            x = x + 0.25 * self.field(torch.cat([x, t.expand(x.shape[0], 1)], 1))
        return x


add("U-Net", "by hand", lambda: UNet(False), numbers((3, 16, 16), (3, 16, 16)), squares)
add("U-Net, batch norm", "by hand", lambda: UNet(True), numbers((3, 16, 16), (3, 16, 16)), squares)
add("WaveNet", "by hand", WaveNet, numbers((1, 32), (1, 32)), squares)
add("PointNet", "by hand", PointNet, numbers((3, 20), labels=10), classes)
add("SIREN", "by hand", Siren, numbers((2,), (3,)), squares)
add(
    "variational autoencoder's mean",
    "by hand",
    Autoencoder,
    lambda n, g: (lambda x: (x, x))(torch.randn(n, 3, 16, 16, generator=g)),
    elbo,
)
add("neural ODE", "by hand", NeuralODE, numbers((8,), (8,)), squares)

# --- tables, graphs, pairs ------------------------------------------------------------------------------------------


class DLRM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        all_of_them = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = all_of_them @ all_of_them.transpose(1, 2)
        row, column = torch.triu_indices(4, 4, offset=1)
        return self.top(torch.cat([x, products[:, row, column]], 1)).squeeze(1)


class Factors(nn.Module):
    """Neural collaborative filtering."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 16), nn.Embedding(40, 16)
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
        self.out = nn.Linear(32, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        u, i = self.users(user), self.items(item)
        return self.out(torch.cat([u * i, self.mlp(torch.cat([u, i], -1))], -1)).squeeze(-1)


class GraphNet(nn.Module):
    """A batch of graphs of ten nodes each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 32), nn.Linear(32, 10)
        self.message, self.update = nn.Linear(64, 32), nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        b, n, d = h.shape
        source, target = (edges[..., i, None].expand(-1, -1, d) for i in range(2))
        for _ in range(2):
            m = F.relu(self.message(torch.cat([h.gather(1, source), h.gather(1, target)], -1)))
            received = torch.zeros_like(h).scatter_add(1, target, m)
            h = self.update(received.reshape(-1, d), h.reshape(-1, d)).view(b, n, d)
        return self.head(h.mean(1))


class OneGraph(nn.Module):
    """A batch is one graph: its nodes are no samples, since edges join them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.a(x))
        h = h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
        return self.b(h)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, pair: dict[str, torch.Tensor]) -> dict[str, Any]:
        a, b = self.trunk(pair["left"]), self.trunk(pair["right"])
        return {"distance": (a - b).square().sum(-1), "both": (a, b)}


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(2))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.left(a), dim=-1) @ F.normalize(self.right(b), dim=-1).T / 0.1


def clicks(samples: int, generator: torch.Generator) -> Any:
    return (
        torch.randn(samples, 5, generator=generator),
        torch.randint(0, 50, (samples, 3, 2), generator=generator),
        torch.rand(samples, generator=generator).round(),
    )


def ratings(samples: int, generator: torch.Generator) -> Any:
    u, i = torch.randint(0, 50, (samples,), generator=generator), torch.randint(0, 40, (samples,), generator=generator)
    return u, i, torch.randn(samples, generator=generator)


def graphs(samples: int, generator: torch.Generator) -> Any:
    x, edges = (
        torch.randn(samples, 10, 4, generator=generator),
        torch.randint(0, 10, (samples, 24, 2), generator=generator),
    )
    return x, edges, torch.randint(0, 10, (samples,), generator=generator)


def one_graph(samples: int, generator: torch.Generator) -> Any:
    nodes = 4 * samples
    x, edges = torch.randn(nodes, 4, generator=generator), torch.randint(0, nodes, (2, 3 * nodes), generator=generator)
    return x, edges, torch.randint(0, 10, (nodes,), generator=generator)


def pairs(samples: int, generator: torch.Generator) -> Any:
    a, b = (torch.randn(samples, 16, generator=generator) for _ in range(2))
    return {"left": a, "right": b}, torch.rand(samples, generator=generator).round()


def margin(output: dict[str, torch.Tensor], same: torch.Tensor) -> torch.Tensor:
    d = output["distance"]
    return (same * d + (1 - same) * F.relu(1 - d)).mean() + 1e-3 * output["both"][0].square().mean()


add("DLRM", "by hand", DLRM, clicks, F.binary_cross_entropy_with_logits)
add("collaborative filtering", "by hand", Factors, ratings, F.mse_loss)
add("graphs, scatter_add", "by hand", GraphNet, graphs, classes)
add("one graph a batch", "by hand", OneGraph, one_graph, classes)
add("siamese, dicts", "by hand", Siamese, pairs, margin)
add(
    "contrastive, in-batch negatives",
    "by hand",
    Contrastive,
    lambda n, g: (torch.randn(n, 16, generator=g), torch.randn(n, 16, generator=g), torch.arange(n)),
    F.cross_entropy,
)

# --- what is against parallelism ------------------------------------------------------------------------------------


class Net(nn.Module):
    """Three linear layers and something odd between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def odd(self, h: torch.Tensor) -> torch.Tensor:
        return h

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(self.odd(F.relu(self.a(x))))))


class BranchOnData(Net):
    def odd(self, h: torch.Tensor) -> torch.Tensor:
        return h if h.mean() > 0.31 else h / h.norm(dim=-1, keepdim=True)


class BranchOnMode(Net):
    def odd(self, h: torch.Tensor) -> torch.Tensor:
        return h if self.training else F.normalize(h, dim=-1)


class LoopOnData(Net):
    def odd(self, h: torch.Tensor) -> torch.Tensor:
        for _ in range(int(h.sum().abs() * 10) % 3 + 1):
            h = torch.tanh(self.b(h))
        return h


class Counter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.k = 0

    def odd(self, h: torch.Tensor) -> torch.Tensor:
        self.k += self.training
        return h if self.k % 2 else torch.tanh(self.b(h))


class Average(Net):
    """Keeps an average of what passes, and a number of calls, in buffers; centres by it."""

    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def odd(self, h: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return h - self.mean


class Direct(nn.Module):
    """Parameters without modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(16, 64) * 0.2), nn.Parameter(torch.randn(64, 10) * 0.1)
        self.b1 = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x @ self.w1 + self.b1) @ self.w2


class Shared(nn.Module):
    """One block called four times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(96, 32), Block(), nn.Linear(32, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)


class Mixed(nn.Module):
    """Layers of several precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32).double(), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)).double())).float())


class Hyper(nn.Module):
    """A network whose weights another one writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.out = nn.Linear(16, 16 * 24), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.writer(x).view(-1, 24, 16) / 4
        return self.out(torch.bmm(weight, x[:, :, None]).squeeze(-1).relu())


def normalised(kind: str) -> nn.Module:
    net = Net()
    wrap = {
        "weight_norm": parametrizations.weight_norm,
        "weight_norm hooks": weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "spectral_norm hooks": spectral_norm,
        "orthogonal": parametrizations.orthogonal,
    }[kind]
    net.b = wrap(net.b)
    net.a = wrap(net.a) if kind != "orthogonal" else net.a
    return net


VECTORS = numbers((16,), labels=10)
for title, kind in {
    "branch on data": BranchOnData,
    "branch on self.training": BranchOnMode,
    "loop on data": LoopOnData,
    "counter in Python": Counter,
    "averages in buffers": Average,
    "parameters used directly": Direct,
    "frozen layer": Frozen,
    "float64 layer": Mixed,
    "hypernetwork": Hyper,
}.items():
    add(title, "by hand", kind, VECTORS, classes)
for title in ("weight_norm", "weight_norm hooks", "spectral_norm", "spectral_norm hooks", "orthogonal"):
    add(title, "by hand", lambda k=title: normalised(k), VECTORS, classes)  # type: ignore[misc]
add("a block called four times", "by hand", Shared, words(), next_token)
add(
    "batch norm",
    "by hand",
    lambda: nn.Sequential(conv(3, 8, True), conv(8, 16, True), nn.Flatten(), nn.Linear(16 * 256, 10)),
    pictures(16),
    classes,
)
