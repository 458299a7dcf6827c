"""Steps of notebook 4, the experts: SiTU-GLU, the router, dispatch, Stable LatentMoE, Quantile Balancing (K3 report 2.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.func import functional_call

from minimodel import layers, routing
from minimodel.checks.grading import Step
from minimodel.config import K3Config
from minimodel.latent_moe import StableLatentMoE, run_experts

# ---- the activation ----
situ_glu = Step("situ_glu", layers.situ_glu, lambda draw: {"gate": 6 * draw.normal(3, 4), "up": 30 * draw.normal(3, 4)}, ("y [T F]",))


@situ_glu.slip("this is SwiGLU: nothing keeps it from growing. Both branches need their tanh")
def swiglu(gate, up):
    return F.silu(gate) * up


@situ_glu.slip("the caps are clamps. tanh bends smoothly, so that a gradient always passes")
def clamps(gate, up):
    return gate.clamp(-4, 4) * torch.sigmoid(gate) * up.clamp(-25, 25)


@situ_glu.slip("the two caps are swapped: 4 is the gate's, 25 the up branch's")
def caps_swapped(gate, up):
    return layers.situ_glu(gate, up, 25.0, 4.0)


@situ_glu.slip("the division inside tanh is missing: beta tanh(x / beta), so that small x passes unchanged")
def not_divided(gate, up):
    return 4 * torch.tanh(gate) * torch.sigmoid(gate) * 25 * torch.tanh(up)


@situ_glu.slip("the sigmoid reads the capped gate. It reads the gate itself")
def sigmoid_of_the_capped(gate, up):
    a = 4 * torch.tanh(gate / 4)
    return a * torch.sigmoid(a) * 25 * torch.tanh(up / 25)


@situ_glu.slip("the up branch has no cap. Kimi K3 caps both")
def one_cap(gate, up):
    return layers.situ_glu(gate, up, 4.0, None)


@situ_glu.slip("gate and up are swapped")
def branches_swapped(gate, up):
    return layers.situ_glu(up, gate)


@situ_glu.law("no output is larger than 4 * 25")
def bounded(mine, gate, up):
    return bool((mine(1e3 * gate, 1e3 * up).abs() <= 100.001).all())


# ---- the router ----
def _by_index(results):
    """Weights and indices with each token's experts in ascending order: which came first says nothing."""
    weights, indices = results
    order = indices.argsort(-1)
    return weights.gather(-1, order), indices.gather(-1, order)


def _scores(draw):
    S, E = draw.pick((6, 5), (4, 8))
    return {"scores": draw.uniform(0.05, 0.95, S, E), "bias": draw.uniform(-0.6, 0.6, E)}


def reference_route(scores, bias, top_k):
    return routing.route(scores, bias, top_k)[:2]


route = Step("route", reference_route, lambda draw: {**_scores(draw), "top_k": draw.pick(2, 3)}, ("weights [S k]", "indices [S k]"),
             alike=_by_index)  # fmt: skip


@route.slip("the bias is inside the mixture weights. It steers the selection only; weights come from the unbiased scores")
def bias_in_the_weights(scores, bias, top_k):
    values, indices = (scores + bias).topk(top_k, -1)
    return values / values.sum(-1, keepdim=True), indices


@route.slip("the bias plays no part. Experts are chosen by scores + bias")
def bias_ignored(scores, bias, top_k):
    return reference_route(scores, 0 * bias, top_k)


@route.slip("the weights are not renormalized: each token's k weights sum to one")
def not_renormalized(scores, bias, top_k):
    indices = (scores + bias).topk(top_k, -1).indices
    return scores.gather(-1, indices), indices


@route.slip("the weights were divided by the sum over all experts. Only the chosen ones share the token")
def normalized_over_all(scores, bias, top_k):
    indices = (scores + bias).topk(top_k, -1).indices
    return (scores / scores.sum(-1, keepdim=True)).gather(-1, indices), indices


@route.slip("a softmax over the chosen scores. They are sigmoids already: divide them by their sum")
def softmax_of_the_chosen(scores, bias, top_k):
    indices = (scores + bias).topk(top_k, -1).indices
    return scores.gather(-1, indices).softmax(-1), indices


@route.slip("the bias is subtracted. It is added: a starved expert has a positive one")
def bias_subtracted(scores, bias, top_k):
    return reference_route(scores, -bias, top_k)


@route.law("the weights of a token sum to one")
def route_sums_to_one(mine, scores, bias, top_k):
    return torch.allclose(mine(scores, bias, top_k)[0].sum(-1), torch.ones_like(scores[:, 0]), atol=1e-5)


# ---- dispatch ----
def reference_experts(z, weights, indices, w1, w3, w2):
    stacks = {"w1": w1, "w3": w3, "w2": w2}
    return run_experts(lambda name, e: stacks[name][e], None, z, weights, indices, len(w1), K3Config.meeting())


def _dispatch_inputs(draw):
    S, E, k, L, width = draw.pick((6, 4, 2, 3, 5), (5, 5, 3, 4, 3), (1, 3, 1, 3, 3))
    weights, indices = reference_route(draw.uniform(0.05, 0.95, S, E), torch.zeros(E, dtype=draw.dtype), k)
    return {"z": draw.normal(S, L), "weights": weights, "indices": indices, "w1": draw.normal(E, width, L), "w3": draw.normal(E, width, L),
            "w2": draw.normal(E, L, width)}  # fmt: skip


routed_experts = Step("routed_experts", reference_experts, _dispatch_inputs, ("u [S L]",))


@routed_experts.slip("the experts' outputs are added up without their weights")
def unweighted(z, weights, indices, w1, w3, w2):
    return reference_experts(z, torch.ones_like(weights), indices, w1, w3, w2)


@routed_experts.slip("the weight went into the expert, with its input. It multiplies what comes out")
def weighted_input(z, weights, indices, w1, w3, w2):
    parts = [reference_experts(p[:, None] * z, torch.ones_like(p)[:, None], e[:, None], w1, w3, w2)
             for p, e in zip(weights.T, indices.T, strict=True)]  # fmt: skip
    return sum(parts)


@routed_experts.slip("w1 and w3 are swapped: w1 makes the gate, w3 the up branch, w2 goes back down")
def gate_and_up_swapped(z, weights, indices, w1, w3, w2):
    return reference_experts(z, weights, indices, w3, w1, w2)


@routed_experts.slip("a token's j-th choice went to expert j. It goes to expert indices[token, j]")
def choice_as_expert(z, weights, indices, w1, w3, w2):
    return reference_experts(z, weights, torch.arange(indices.shape[1]).expand_as(indices), w1, w3, w2)


@routed_experts.slip("only a token's first choice was run. All k add up")
def first_choice_only(z, weights, indices, w1, w3, w2):
    return reference_experts(z, weights[:, :1], indices[:, :1], w1, w3, w2)


@routed_experts.law("a token whose weights are zero gets zeros")
def weights_of_zero(mine, z, weights, indices, w1, w3, w2):
    return not mine(z, 0 * weights, indices, w1, w3, w2).any()


# ---- the whole layer ----
NARROW = dict(hidden_size=8, routed_expert_hidden_size=4, moe_intermediate_size=5, num_experts=6, num_experts_per_token=2)


def _moe_inputs(draw):
    D, L, M, E = (NARROW[name] for name in ("hidden_size", "routed_expert_hidden_size", "moe_intermediate_size", "num_experts"))
    shapes = {
        "gate.weight": (E, D), "gate.e_score_correction_bias": (E,), "routed_expert_down_proj.weight": (L, D),
        "routed_expert_norm.weight": (L,), "routed_expert_up_proj.weight": (D, L),
        "experts.w1": (E, M, L), "experts.w3": (E, M, L), "experts.w2": (E, L, M),
        "shared_experts.gate_proj.weight": (2 * M, D), "shared_experts.up_proj.weight": (2 * M, D),
        "shared_experts.down_proj.weight": (D, 2 * M),
    }  # fmt: skip
    p = {name: draw.normal(*shape) for name, shape in shapes.items()}
    return {"x": draw.normal(2, 3, D), "p": p, "top_k": NARROW["num_experts_per_token"]}


def _layer(x, p, change=lambda layer: None):
    with torch.random.fork_rng(devices=[]):  # building draws weights, which are then replaced
        layer = StableLatentMoE(K3Config.meeting().replace(**NARROW)).eval()
    change(layer)
    return functional_call(layer, {name: value for name, value in p.items() if name in layer.state_dict()}, (x,))


latent_moe = Step("latent_moe", lambda x, p, top_k: _layer(x, p), _moe_inputs, ("y [B T D]",))


@latent_moe.slip("the norm after the weighted sum is missing, one of the three additions that make LatentMoE stable")
def moe_without_norm(x, p, top_k):
    return _layer(x, p, lambda layer: setattr(layer, "routed_expert_norm", None))


@latent_moe.slip("each expert's output was normed. The norm comes once, after the weighted sum")
def normed_one_by_one(x, p, top_k):
    flat = x.flatten(0, 1)
    z = flat @ p["routed_expert_down_proj.weight"].T
    weights, indices = reference_route(torch.sigmoid(flat @ p["gate.weight"].T), p["gate.e_score_correction_bias"], top_k)
    stacks = [p[f"experts.{name}"] for name in ("w1", "w3", "w2")]
    ones = torch.ones_like(weights[:, :1])
    u = sum(weights[:, [j]] * layers.rms_norm(reference_experts(z, ones, indices[:, [j]], *stacks), p["routed_expert_norm.weight"])
            for j in range(top_k))  # fmt: skip
    return _layer(x, {**p, "experts.w2": 0 * p["experts.w2"]}) + (u @ p["routed_expert_up_proj.weight"].T).view_as(x)


@latent_moe.slip("the shared experts are missing. They read the full x and are added at the end")
def no_shared_experts(x, p, top_k):
    return _layer(x, p, lambda layer: setattr(layer, "shared_experts", None))


@latent_moe.slip("only the shared experts are left: W_up RMSNorm(u) of the routed ones is missing")
def no_routed_experts(x, p, top_k):
    return _layer(x, {**p, "routed_expert_up_proj.weight": 0 * p["routed_expert_up_proj.weight"]})


@latent_moe.slip("the correction bias is not used. Experts are chosen by scores + bias")
def moe_without_bias(x, p, top_k):
    return _layer(x, {**p, "gate.e_score_correction_bias": 0 * p["gate.e_score_correction_bias"]})


@latent_moe.slip("the norm's gain is missing")
def moe_norm_without_gain(x, p, top_k):
    return _layer(x, {**p, "routed_expert_norm.weight": torch.ones_like(p["routed_expert_norm.weight"])})


@latent_moe.slip("gate and up of the shared experts are swapped")
def shared_branches_swapped(x, p, top_k):
    gate, up = "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"
    return _layer(x, {**p, gate: p[up], up: p[gate]})


@latent_moe.law("with silent shared experts, the size of what the routed ones say does not matter: it is normed")
def size_of_the_experts(mine, x, p, top_k):
    silent = {**p, "shared_experts.down_proj.weight": 0 * p["shared_experts.down_proj.weight"]}
    once, twice = (mine(x, {**silent, "experts.w2": loud * p["experts.w2"]}, top_k) for loud in (1e3, 2e3))
    return torch.allclose(once, twice, atol=1e-3)


# ---- balancing ----
def _balance_inputs(draw):
    S, E, k = draw.pick((24, 4, 1), (32, 8, 2), (21, 4, 2), (10, 3, 1))
    return {"scores": draw.uniform(0.05, 0.95, S, E), "bias": draw.uniform(-0.3, 0.3, E), "top_k": k}


quantile_bias = Step("quantile_bias", routing.quantile_bias, _balance_inputs, ("bias [E]",))


def _quantile(scores, bias, top_k, *, cut=1, rank=0, sign=-1, center=True):
    """The rule with its parts open: which biased score is the cutoff, which order statistic is taken, its sign, its mean."""
    cutoff = (scores + bias).topk(top_k + cut, -1).values[:, -1]
    q = len(scores) * top_k // scores.shape[1]
    b = sign * (scores - cutoff[:, None]).sort(0, descending=True).values[q + rank]
    return b - b.mean() if center else b


@quantile_bias.slip("the mean was not taken off: all biases together may not drift")
def not_centered(scores, bias, top_k):
    return _quantile(scores, bias, top_k, center=False)


@quantile_bias.slip("the cutoff is the k-th biased score, the last that got in. It is the (k+1)-th, the first that did not")
def cutoff_of_the_last_in(scores, bias, top_k):
    return _quantile(scores, bias, top_k, cut=0)


@quantile_bias.slip("the q-th largest margin was taken. It is the (q+1)-th: exactly q tokens then stay above it")
def one_rank_early(scores, bias, top_k):
    return _quantile(scores, bias, top_k, rank=-1)


@quantile_bias.slip("the sign is turned round: an expert whose margins are low needs a higher bias")
def wrong_sign_of_the_bias(scores, bias, top_k):
    return _quantile(scores, bias, top_k, sign=1)


@quantile_bias.slip("the cutoff was taken from plain scores. It is the (k+1)-th of scores + bias, as in this step's forward pass")
def cutoff_without_bias(scores, bias, top_k):
    return _quantile(scores, 0 * bias, top_k)


@quantile_bias.slip("the quantile was interpolated between two margins. Take one of them, the (q+1)-th largest")
def interpolated(scores, bias, top_k):
    cutoff = (scores + bias).topk(top_k + 1, -1).values[:, -1]
    b = -torch.quantile(scores - cutoff[:, None], 1 - top_k / scores.shape[1], 0)
    return b - b.mean()


@quantile_bias.slip("the old bias was added. The rule gives the new one; the old one counts only in the cutoff")
def adds_up(scores, bias, top_k):
    return bias + _quantile(scores, bias, top_k)


@quantile_bias.law("the biases sum to zero")
def centered_bias(mine, scores, bias, top_k):
    return abs(float(mine(scores, bias, top_k).sum())) < 1e-5


STEPS = (situ_glu, route, routed_experts, latent_moe, quantile_bias)
