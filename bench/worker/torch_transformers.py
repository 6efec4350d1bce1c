"""BERT, GPT-2 and ViT in plain torch, without dropout. bench/catalogue/transformers.py has tables of their sizes."""

import torch
from torch import nn
from torch.nn import functional as F

from bench.worker.model_sizes import TRANSFORMERS, VIT_B16, VIT_PATCH, Size

CLASSES = 1000
LAYER_NORM_EPS = 1e-5


def norm(hidden: int) -> nn.LayerNorm:
    return nn.LayerNorm(hidden, eps=LAYER_NORM_EPS)


class Attention(nn.Module):
    """Multi-head attention; query, key and value in one matrix."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = size.heads, causal
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden)
        self.output = nn.Linear(size.hidden, size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        # A rank of a split network has some of the heads, so the width is not that of x.
        parts = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        y: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return y


def mlp(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))


class PreNormBlock(nn.Module):
    """Of GPT-2 and ViT."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        self.norm1, self.attention = norm(size.hidden), Attention(size, causal)
        self.norm2, self.mlp = norm(size.hidden), mlp(size.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class PostNormBlock(nn.Module):
    """Of BERT, whose query, key and value are three matrices."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output, self.norm1 = nn.Linear(hidden, hidden), norm(hidden)
        self.mlp, self.norm2 = mlp(hidden), norm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(batch, tokens, self.heads, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        x = self.norm1(x + self.output(mixed.transpose(1, 2).reshape(batch, tokens, -1)))
        y: torch.Tensor = self.norm2(x + self.mlp(x))
        return y


class GPT2(nn.Module):
    """Returns the logits of every position. The head has the weights of the word embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size.vocabulary, size.hidden), nn.Embedding(size.positions, size.hidden)
        self.blocks = nn.Sequential(*(PreNormBlock(size, causal=True) for _ in range(size.blocks)))
        self.ln_f = norm(size.hidden)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.ln_f(self.blocks(self.wte(words) + self.wpe(places)))
        return F.linear(x, self.wte.weight)


class Bert(nn.Module):
    """Returns the logits of every position and of the next sentence: the two heads of pre-training."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.word = nn.Embedding(size.vocabulary, hidden)
        self.position, self.segment = nn.Embedding(size.positions, hidden), nn.Embedding(2, hidden)
        self.norm = norm(hidden)
        self.blocks = nn.Sequential(*(PostNormBlock(size) for _ in range(size.blocks)))
        self.pooler = nn.Linear(hidden, hidden)
        self.transform = nn.Sequential(nn.Linear(hidden, hidden), nn.GELU(), norm(hidden))
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))
        self.next_sentence = nn.Linear(hidden, 2)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(words.shape[1], device=words.device)
        types = torch.zeros_like(words)
        x = self.blocks(self.norm(self.word(words) + self.position(places) + self.segment(types)))
        masked = F.linear(self.transform(x), self.word.weight, self.bias)
        return masked, self.next_sentence(torch.tanh(self.pooler(x[:, 0])))


class ViT(nn.Module):
    def __init__(self, size: Size, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.hidden, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.hidden))
        self.positions = nn.Parameter(torch.empty(1, size.positions, size.hidden).normal_(std=0.02))
        self.blocks = nn.Sequential(*(PreNormBlock(size, causal=False) for _ in range(size.blocks)))
        self.norm, self.head = norm(size.hidden), nn.Linear(size.hidden, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        y: torch.Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return y


def language_model(name: str) -> nn.Module:
    size = TRANSFORMERS[name]
    model = Bert(size) if name.startswith("bert") else GPT2(size)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
    return model


def vit_b16() -> nn.Module:
    return ViT(VIT_B16, VIT_PATCH)


def loss(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy: one label per image, or one per position; BERT has a second head with a label per sequence."""
    if isinstance(output, tuple):
        words, following = output
        return loss(words, labels) + F.cross_entropy(following, labels[:, 0] % 2)
    return F.cross_entropy(output.transpose(1, 2) if output.dim() == 3 else output, labels)
