"""Steps of notebook 4, reading depth: Attention Residuals and what counts as a source (K3 report 2.2)."""

from __future__ import annotations

import torch

from minimodel.attention_residuals import DepthSources
from minimodel.attention_residuals import attention_residual as reference_residual
from minimodel.checks.grading import Step
from minimodel.layers import rms_norm

EPS = 1e-5

attention_residual = Step(
    "attention_residual", reference_residual,
    lambda draw: {"sources": draw.uniform(0.2, 4.0, draw.pick(3, 1, 4), 1) * draw.normal(2, draw.pick(3, 1, 4), 5), "query": draw.normal(5),
                  "gain": draw.normal(5)},
    ("h [T D]",),
)  # fmt: skip


def _read(scores, values):
    return (scores.softmax(-1)[..., None] * values).sum(-2)


@attention_residual.slip("the sources are not normed before they are compared with the query, so that the largest wins")
def sources_not_normed(sources, query, gain):
    return _read(sources @ (gain * query), sources)


@attention_residual.slip("what is mixed was normed too. Only scores come from RMSNorm(v); the mix is of the sources as they are")
def values_normed(sources, query, gain):
    normed = rms_norm(sources, gain, EPS)
    return _read(normed @ query, normed)


@attention_residual.slip("the scores were divided by the root of D. There is no scale here")
def depth_scores_scaled(sources, query, gain):
    return reference_residual(sources, query * len(query) ** -0.5, gain)


@attention_residual.slip("a sigmoid weighs each source by itself. The weights of the sources sum to one: softmax")
def sigmoid_weights(sources, query, gain):
    return (torch.sigmoid(rms_norm(sources, gain, EPS) @ query)[..., None] * sources).sum(-2)


@attention_residual.slip("this is the plain mean of the sources: what is read before training. The query weighs them")
def plain_mean(sources, query, gain):
    return sources.mean(-2)


@attention_residual.slip("the gain of the norm is missing")
def depth_without_gain(sources, query, gain):
    return reference_residual(sources, query, torch.ones_like(gain))


@attention_residual.slip("the softmax runs over tokens. It runs over the sources of one token")
def softmax_over_tokens(sources, query, gain):
    return ((rms_norm(sources, gain, EPS) @ query).softmax(0)[..., None] * sources).sum(-2)


@attention_residual.law("with a zero query the sources are averaged")
def zero_query_averages(mine, sources, query, gain):
    return torch.allclose(mine(sources, 0 * query, gain), sources.mean(-2), atol=1e-5)


# ---- the sources ----
def reference_sources(embedding, outputs, block):
    depth = DepthSources(embedding[None], 2 * block)
    for output in outputs:
        depth.write(output[None])
    return depth.stacked()[0].transpose(0, 1)


depth_sources = Step(
    "depth_sources", reference_sources,
    lambda draw: {"embedding": draw.normal(3, 4), "outputs": draw.normal(draw.pick(7, 4, 1, 0, 9), 3, 4), "block": draw.pick(1, 2)},
    ("sources [N T D]",),
)  # fmt: skip


@depth_sources.slip("a block was ended after `block` sublayers. It counts layers, and a layer has two: attention and feed-forward")
def block_in_sublayers(embedding, outputs, block):
    return _by_sum(embedding, outputs, block)


@depth_sources.slip("the embedding was added to the first block. It is a source of its own, the first one")
def embedding_in_the_first_block(embedding, outputs, block):
    sources = reference_sources(embedding, outputs, block)
    return torch.cat([sources[:1] + sources[1:2], sources[2:]]) if len(sources) > 1 else sources


@depth_sources.slip("every output became a source. Inside a block the outputs are summed")
def every_output(embedding, outputs, block):
    return torch.cat([embedding[None], outputs])


@depth_sources.slip("the sum of the block that is not finished yet is missing. It is the last source")
def only_finished_blocks(embedding, outputs, block):
    sources = reference_sources(embedding, outputs, block)
    return sources[:-1] if len(outputs) % (2 * block) else sources


@depth_sources.slip("the sum goes on through all blocks, as in a plain residual stream. After a finished block it starts again")
def never_starts_again(embedding, outputs, block):
    return reference_sources(embedding, outputs, block).cumsum(0)


def _by_sum(embedding, outputs, size):
    return torch.stack([embedding, *(part.sum(0) for part in outputs.split(size) if len(part))])


@depth_sources.law("all sources together are the embedding plus every output, each once")
def nothing_is_lost(mine, embedding, outputs, block):
    return torch.allclose(mine(embedding, outputs, block).sum(0), embedding + outputs.sum(0), atol=1e-5)


STEPS = (attention_residual, depth_sources)
