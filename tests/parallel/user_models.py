"""Five models as users write them, who have never heard of hocket: nothing in them is made for parallelism.

`CASES[name]` tells how to make the model, a batch for it (model's inputs, then the target) and its loss, a mean over
the samples. Models are made from the seed that the caller has set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

# --- a plain CNN ----------------------------------------------------------------------------------------------------


class CNN(nn.Module):
    def __init__(self, classes: int = 10, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.pool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(2 * width * 4, 64), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(64, classes)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


# --- a U-Net with skip connections ----------------------------------------------------------------------------------


class DoubleConv(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)))


class Up(nn.Module):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(channels_in, channels_in // 2, 2, stride=2)
        self.conv = DoubleConv(channels_in, channels_out)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        dy = skip.size(2) - x.size(2)
        dx = skip.size(3) - x.size(3)
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    def __init__(self, channels: int = 3, classes: int = 2, width: int = 8) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = Up(4 * width, 2 * width)
        self.up2 = Up(2 * width, width)
        self.outc = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.up1(x3, x2)
        x = self.up2(x, x1)
        return self.outc(x)


# --- a GPT-like language model --------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(
        self,
        vocab: int = 40,
        n_layer: int = 2,
        n_head: int = 4,
        n_embd: int = 32,
        block_size: int = 24,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([GPTBlock(n_embd, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.1)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        b, t = idx.size()
        assert t <= self.block_size, f"sequence of length {t} is longer than {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# --- sequence to sequence -------------------------------------------------------------------------------------------


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size: int, dropout: float, maxlen: int = 64) -> None:
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        table = torch.zeros((maxlen, emb_size))
        table[:, 0::2] = torch.sin(pos * den)
        table[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", table.unsqueeze(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(x + self.pos_embedding[:, : x.size(1)])


class Seq2Seq(nn.Module):
    def __init__(
        self,
        src_vocab: int = 32,
        tgt_vocab: int = 36,
        emb_size: int = 32,
        nhead: int = 4,
        layers: int = 2,
        ffn: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.emb_size = emb_size
        self.src_tok_emb = nn.Embedding(src_vocab, emb_size, padding_idx=0)
        self.tgt_tok_emb = nn.Embedding(tgt_vocab, emb_size, padding_idx=0)
        self.positional_encoding = PositionalEncoding(emb_size, dropout)
        self.transformer = nn.Transformer(
            d_model=emb_size,
            nhead=nhead,
            num_encoder_layers=layers,
            num_decoder_layers=layers,
            dim_feedforward=ffn,
            dropout=dropout,
            batch_first=True,
        )
        self.generator = nn.Linear(emb_size, tgt_vocab)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device)
        padding = src == 0
        src_emb = self.positional_encoding(self.src_tok_emb(src) * math.sqrt(self.emb_size))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(tgt) * math.sqrt(self.emb_size))
        out = self.transformer(
            src_emb,
            tgt_emb,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.generator(out)


# --- MLP-mixer ------------------------------------------------------------------------------------------------------


class MlpBlock(nn.Module):
    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class MixerBlock(nn.Module):
    def __init__(self, patches: int, dim: int, token_hidden: int, channel_hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mixing = MlpBlock(patches, token_hidden, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mixing = MlpBlock(dim, channel_hidden, dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token_mixing(y).transpose(1, 2)
        return x + self.channel_mixing(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(
        self,
        image: int = 16,
        patch: int = 4,
        dim: int = 24,
        depth: int = 3,
        token_hidden: int = 32,
        channel_hidden: int = 64,
        classes: int = 10,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        patches = (image // patch) ** 2
        self.stem = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.blocks = nn.Sequential(
            *[MixerBlock(patches, dim, token_hidden, channel_hidden, dropout) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


# --- how to use them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with data and a loss.

    Attributes:
        model: makes it.
        batch: of so many samples, from this generator: the model's inputs, then the target.
        loss_fn: of the model's output and the target: a mean over the samples.
    """

    model: Callable[..., nn.Module]
    batch: Callable[[int, torch.Generator], tuple[torch.Tensor, ...]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def token_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy, where the first axes are samples and positions and every sample has as many positions."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def _pictures(n: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 3, 16, 16, generator=g), torch.randint(0, 10, (n,), generator=g)


def _masks(n: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 3, 16, 16, generator=g), torch.randint(0, 2, (n, 16, 16), generator=g)


def _text(n: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    words = torch.randint(0, 40, (n, 13), generator=g)
    return words[:, :-1], words[:, 1:]


def _sentences(n: int, g: torch.Generator) -> tuple[torch.Tensor, ...]:
    source = torch.randint(1, 32, (n, 10), generator=g)
    source[::2, 8:] = 0  # padding
    target = torch.randint(1, 36, (n, 9), generator=g)
    return source, target[:, :-1], target[:, 1:]


CASES: dict[str, Case] = {
    "cnn": Case(CNN, _pictures, F.cross_entropy),
    "unet": Case(UNet, _masks, F.cross_entropy),
    "gpt": Case(GPT, _text, token_loss),
    "seq2seq": Case(Seq2Seq, _sentences, token_loss),
    "mixer": Case(MLPMixer, _pictures, F.cross_entropy),
}
