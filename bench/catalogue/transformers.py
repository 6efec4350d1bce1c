"""BERT, GPT-2 and ViT: embeddings, equal blocks, and a head.

A language model's head has the weights of its word embedding (they are tied), so that gradient has two parts. The
second part comes from the embedding, the last layer of backward: frameworks send the sum, once, at the end. They also
send the whole table, although a batch uses only some of its rows (torch's default; in TensorFlow, what Horovod's
`sparse_as_dense` does).
"""

from __future__ import annotations

from math import prod

from bench.catalogue.layers import Layer, Shape
from bench.worker.model_sizes import Size


def _linear(name: str, inputs: int, out: int, rows: int) -> Layer:
    return Layer(name, ((out, inputs), (out,)), rows * inputs * out)


def _norm(name: str, hidden: int) -> Layer:
    return Layer(name, ((hidden,), (hidden,)), 0)


def _attention(name: str, hidden: int, tokens: int) -> Layer:
    """Scores and weighted sums: two products without parameters."""
    return Layer(name, (), 2 * tokens * tokens * hidden)


def _tied(name: str, size: Size, tokens: int, bias: bool) -> Layer:
    """The output layer. Its weights are those of the word embedding."""
    return Layer(name, ((size.vocabulary,),) if bias else (), tokens * size.hidden * size.vocabulary)


def _embedding(name: str, *shapes: Shape) -> Layer:
    return Layer(name, shapes, 0)


def bert(size: Size, tokens: int) -> tuple[Layer, ...]:
    """With both heads of pre-training: masked words and next sentence."""
    h = size.hidden
    layers = [
        _embedding("embeddings.word", (size.vocabulary, h)),
        _embedding("embeddings.position", (size.positions, h)),
        _embedding("embeddings.type", (2, h)),
        _norm("embeddings.norm", h),
    ]
    for block in range(size.blocks):
        name = f"encoder.{block}"
        layers += [_linear(f"{name}.{part}", h, h, tokens) for part in ("query", "key", "value")]
        layers += [_attention(f"{name}.attention", h, tokens), _linear(f"{name}.output", h, h, tokens)]
        layers += [_norm(f"{name}.norm1", h), _linear(f"{name}.mlp1", h, 4 * h, tokens)]
        layers += [_linear(f"{name}.mlp2", 4 * h, h, tokens), _norm(f"{name}.norm2", h)]
    layers += [_linear("pooler", h, h, 1), _linear("transform", h, h, tokens), _norm("transform.norm", h)]
    return (*layers, _tied("decoder", size, tokens, bias=True), _linear("next_sentence", h, 2, 1))


def gpt2(size: Size, tokens: int) -> tuple[Layer, ...]:
    h = size.hidden
    layers = [_embedding("wte", (size.vocabulary, h)), _embedding("wpe", (size.positions, h))]
    for block in range(size.blocks):
        layers += _pre_norm_block(f"h.{block}", h, tokens)
    return (*layers, _norm("ln_f", h), _tied("lm_head", size, tokens, bias=False))


def vit(size: Size, patch: int) -> tuple[Layer, ...]:
    h, tokens = size.hidden, size.positions
    patches: Shape = (h, 3, patch, patch)
    layers = [
        Layer("patches", (patches, (h,)), prod(patches) * (tokens - 1)),
        _embedding("class_token", (h,)),
        _embedding("positions", (tokens, h)),
    ]
    for block in range(size.blocks):
        layers += _pre_norm_block(f"encoder.{block}", h, tokens)
    return (*layers, _norm("norm", h), _linear("head", h, 1000, 1))


def _pre_norm_block(name: str, h: int, tokens: int) -> list[Layer]:
    return [
        _norm(f"{name}.norm1", h),
        _linear(f"{name}.qkv", h, 3 * h, tokens),
        _attention(f"{name}.attention", h, tokens),
        _linear(f"{name}.output", h, h, tokens),
        _norm(f"{name}.norm2", h),
        _linear(f"{name}.mlp1", h, 4 * h, tokens),
        _linear(f"{name}.mlp2", 4 * h, h, tokens),
    ]
