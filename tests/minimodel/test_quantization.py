"""Four-bit experts: trained in the grid and stored in it give the same outputs; nothing else is touched; 4.25 bits are 4.25 bits."""

import pytest
import torch

from minimodel import K3Config, K3ForCausalLM, PerHeadMuon
from minimodel.latent_moe import RoutedExperts
from minimodel.mxfp4 import fake_quantize_mxfp4
from minimodel.mxfp8 import fake_quantize_mxfp8
from minimodel.quantization import PackedExperts, bits_per_weight, quantize_model, train_in_four_bits

IDS = torch.arange(24).view(2, 12) % 16


def small_model():
    config = K3Config.mini().replace(vocab_size=32, num_experts=4)
    model = K3ForCausalLM(config, seed=0).eval()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, RoutedExperts):
                for w in (m.w1, m.w3, m.w2):
                    w.mul_(8)  # so that the experts' part of the output can be seen
    return model


def one_token_at_a_time(experts, z, weights, indices):
    """The sum of the definition, with rounded weights and activations."""
    w1, w3, w2 = (fake_quantize_mxfp4(w.detach()) for w in (experts.w1, experts.w3, experts.w2))
    c, rows = experts.config, []
    for x, p, chosen in zip(fake_quantize_mxfp8(z), weights, indices, strict=True):
        total = torch.zeros_like(x)
        for share, e in zip(p, chosen.tolist(), strict=True):
            gate, up = w1[e] @ x, w3[e] @ x
            beta, cap = c.activation_situ_beta, c.activation_situ_linear_beta
            hidden = beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * cap * torch.tanh(up / cap)
            total = total + share * (w2[e] @ fake_quantize_mxfp8(hidden))
        rows.append(total)
    return torch.stack(rows)


def test_rounded_experts_equal_the_definition():
    generator = torch.Generator().manual_seed(0)
    experts = next(m for m in small_model().modules() if isinstance(m, RoutedExperts))
    z, p = torch.randn(10, 64, generator=generator), torch.rand(10, 2, generator=generator)
    indices = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(10)])
    plain = experts(z, p, indices)
    experts.rounding = True
    rounded = experts(z, p, indices)
    assert torch.allclose(rounded, one_token_at_a_time(experts, z, p, indices), rtol=1e-4, atol=1e-6)
    assert torch.equal(PackedExperts(experts)(z, p, indices), rounded)
    assert (rounded - plain).abs().max() > 0.01 * plain.abs().max()


def test_stored_in_four_bits_answers_like_trained_in_four_bits():
    model = small_model()
    with torch.no_grad():
        full = model(IDS).logits
        assert train_in_four_bits(model) == 8
        rounded = model(IDS).logits
        others = {n: p.clone() for n, p in model.named_parameters() if ".experts." not in n}
        stored = quantize_model(model)
        assert torch.equal(model(IDS).logits, rounded)
    assert not torch.equal(rounded, full)
    assert {n: p for n, p in model.named_parameters()}.keys() == others.keys()
    assert all(torch.equal(p, others[n]) for n, p in model.named_parameters())
    assert bits_per_weight(model) == 4.25
    c = model.config
    weights = 8 * c.num_experts * 3 * c.moe_intermediate_size * c.routed_expert_hidden_size
    assert stored * 8 == 4.25 * weights


def test_training_goes_on_through_the_rounding_and_can_leave_it():
    model = small_model().train()
    train_in_four_bits(model)
    optimizer = PerHeadMuon(model, lr=1e-3)
    first = model(IDS, labels=IDS).loss
    first.backward()
    experts = next(m for m in model.modules() if isinstance(m, RoutedExperts))
    assert experts.w1.grad.abs().max() > 0 and torch.isfinite(experts.w2.grad).all()
    before = experts.w1.detach().clone()
    optimizer.step()
    assert not torch.equal(experts.w1, before) and not torch.equal(experts.w1, fake_quantize_mxfp4(experts.w1))
    with torch.no_grad():
        rounded = model.eval()(IDS).logits
        train_in_four_bits(model, on=False)
        assert not torch.equal(model(IDS).logits, rounded)


@pytest.mark.bad_input
def test_what_cannot_be_stored_is_named_and_left_alone():
    meeting = K3ForCausalLM(K3Config.meeting(), seed=0)  # a latent of 48
    with pytest.raises(ValueError, match="w1 has rows of 48 weights, which blocks of 32 do not divide"):
        quantize_model(meeting)
    assert any(isinstance(m, RoutedExperts) for m in meeting.modules())
    with pytest.raises(ValueError, match="no routed experts"):
        train_in_four_bits(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="call quantize_model first"):
        bits_per_weight(meeting)
