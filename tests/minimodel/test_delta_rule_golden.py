"""The KDA operator against other people's kernels: outputs, states and gradients."""

import pytest
import torch

from minimodel import kda, softplus_log_decay
from minimodel.layers import l2norm
from tests.minimodel.common import assert_within, golden

BACKENDS = ("recurrent", "chunked")
NAMES = ("q", "k", "v", "g", "beta")


@pytest.mark.parametrize("options", [{"backend": "recurrent"}, {"backend": "chunked"}, {"backend": "chunked", "chunk_size": 16}], ids=str)
@pytest.mark.parametrize("case", ["b1_t1_tiny", "b2_t37_k16_v24", "b2_t70_g_minus5", "b2_t130_beta_edges", "b1_t96_beta1_nodecay"])
def test_golden_float64(case, options):
    z = golden("kda_recurrent")
    arguments = [z[f"{case}/{name}"].double().requires_grad_() for name in (*NAMES, "h0")]
    o, S = kda(*arguments[:5], initial_state=arguments[5], **options)
    assert_within(o, z[f"{case}/o_f64"], 1e-12)
    assert_within(S, z[f"{case}/ht_f64"], 1e-12)
    ((o * z[f"{case}/do"]).sum() + (S * z[f"{case}/dht"]).sum()).backward()
    for name, x in zip((*NAMES, "h0"), arguments, strict=True):
        assert_within(x.grad, z[f"{case}/d{name}_f64"], 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_scale_and_float32(backend):
    z = golden("kda_recurrent")
    q, k, v, g, beta, h0 = (z[f"b1_t64_scale1/{name}"] for name in (*NAMES, "h0"))
    scale = float(z["b1_t64_scale1/scale"])
    o, S = kda(q.double(), k, v, g, beta, scale=scale, initial_state=h0, backend=backend)
    assert_within(o, z["b1_t64_scale1/o_f64"], 1e-12)
    o, S = kda(q, k, v, g, beta, scale=scale, initial_state=h0, backend=backend)
    assert o.dtype == S.dtype == torch.float32
    assert_within(o, z["b1_t64_scale1/o_f64"], 2e-6)
    assert_within(S, z["b1_t64_scale1/ht_f64"], 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_packed_documents(backend):
    """Against float32 kernels, so ours runs in float64: the difference is their rounding."""
    z, case = golden("kda_triton_interp"), "varlen_0_15_64_100"
    arguments = [z[f"{case}/in_{name}"].double().requires_grad_() for name in (*NAMES, "h0")]
    o, S = kda(*arguments[:5], initial_state=arguments[5], cu_seqlens=z[f"{case}/cu_seqlens"], backend=backend)
    ((o * z[f"{case}/in_do"]).sum() + (S * z[f"{case}/in_dht"]).sum()).backward()
    assert_within(o, z[f"{case}/o"], 2e-6)
    assert_within(S, z[f"{case}/ht"], 2e-6)
    for name, x in zip((*NAMES, "h0"), arguments, strict=True):
        assert_within(x.grad, z[f"{case}/d{name}"], 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_with_kimi_linears_gate(backend):
    """The kernel takes raw projections; here gate, norm and sigmoid stand before the operator."""
    z, case = golden("kda_triton_interp"), "softplus_gate_beta_l2_in_kernel"
    names = (*NAMES, "h0", "A_log", "dt_bias")
    q, k, v, f, b, h0, A_log, dt_bias = arguments = [z[f"{case}/in_{name}"].double().requires_grad_() for name in names]
    g = softplus_log_decay(f, A_log, dt_bias.view(2, 16))
    o, S = kda(l2norm(q), l2norm(k), v, g, torch.sigmoid(b), initial_state=h0, backend=backend)
    ((o * z[f"{case}/in_do"]).sum() + (S * z[f"{case}/in_dht"]).sum()).backward()
    assert_within(o, z[f"{case}/o"], 2e-6)
    assert_within(S, z[f"{case}/ht"], 2e-6)
    for name, x in zip(names, arguments, strict=True):
        assert_within(x.grad, z[f"{case}/d{name}"], 1e-4)
