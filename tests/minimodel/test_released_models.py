"""The released models: K3's and Kimi Linear's own logits, layers, decode steps and gradients, from their own weights."""

import pytest
import torch

from minimodel import K3Config, K3ForCausalLM, load_released
from tests.minimodel.common import assert_within, golden

# ---- the released K3 ----


@pytest.fixture(scope="module")
def k3():
    z = golden("kimi_k3_tiny")
    model = K3ForCausalLM(K3Config.from_hf(z.config()))
    load_released(model, z.under("weights/"))
    return model.eval()


def test_k3_golden_logits(k3):
    z = golden("kimi_k3_tiny")
    for backend in ("chunked", "recurrent"):
        logits = k3(z["full/input_ids"], backend=backend).logits
        assert float((logits - z["full/logits"]).detach().abs().max()) < 5e-5


def test_k3_golden_layer_by_layer(k3):
    """Each layer's running sum, every read over depth, every router, and the parts of one KDA and one MLA layer."""
    z, seen, hooks = golden("kimi_k3_tiny"), {}, []

    def keep(name, take):
        def hook(module, arguments, output):
            seen[name] = take(arguments, output)

        return hook

    # layer 0's first reader has one source and is never called
    readers = [r for layer in k3.model.layers for r in (layer.self_attention_res_proj, layer.mlp_res_proj)][1:]
    for i, reader in enumerate([*readers, k3.model.output_attn_res_proj]):
        hooks.append(reader.register_forward_hook(keep(f"attn_res{i}/out", lambda a, out: out.flatten(0, 1))))
    for i, layer in enumerate(k3.model.layers):
        hooks.append(layer.register_forward_hook(keep(f"layer{i}/out0", lambda a, out: a[0].prefix)))
        ffn = layer.mlp if i == 0 else layer.block_sparse_moe
        for part, module in (("self_attn", layer.self_attn), ("ffn", ffn)):
            hooks.append(module.register_forward_hook(keep(f"layer{i}.{part}/input", lambda a, out: a[0])))
            hooks.append(module.register_forward_hook(keep(f"layer{i}.{part}/out0", lambda a, out: out)))
        if i:
            hooks.append(ffn.gate.register_forward_hook(keep(f"layer{i}.gate", lambda a, out: out)))
    try:
        k3(z["full/input_ids"])
    finally:
        for hook in hooks:
            hook.remove()
    compared = 0
    for name, expected in z.under("full/").items():
        if name in seen:
            torch.testing.assert_close(seen[name], expected, rtol=0, atol=2e-5)
            compared += 1
    assert compared == 8 + 16 + 8
    for i in range(1, 8):
        weights, indices = seen[f"layer{i}.gate"]
        order, theirs = indices.argsort(1), z[f"full/layer{i}.gate/out0"].argsort(1)
        assert torch.equal(indices.gather(1, order), z[f"full/layer{i}.gate/out0"].gather(1, theirs))
        torch.testing.assert_close(weights.gather(1, order), z[f"full/layer{i}.gate/out1"].gather(1, theirs), rtol=0, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 3])
def test_k3_golden_modules_from_their_own_inputs(k3, layer):
    """Without what earlier layers rounded, a module is within 2e-6."""
    z, block = golden("kimi_k3_tiny"), k3.model.layers[layer]
    for part, module in (("self_attn", block.self_attn), ("ffn", block.mlp if layer == 0 else block.block_sparse_moe)):
        assert_within(module(z[f"full/layer{layer}.{part}/input"]), z[f"full/layer{layer}.{part}/out0"], 2e-6)


def test_k3_golden_decode(k3):
    """Prefill of 16 tokens, then five single steps; their states are transposed, their convolution keeps one column more."""
    z = golden("kimi_k3_tiny")
    ids, cache = z["full/input_ids"], k3.new_cache(2)
    parts = [k3(ids[:, :16], cache=cache).logits]
    parts += [k3(ids[:, t : t + 1], cache=cache).logits for t in range(16, 21)]
    assert float((torch.cat(parts, 1) - z["decode/logits"]).detach().abs().max()) < 5e-5
    for layer in (0, 6):
        assert_within(cache.layers[layer].state.mT, z[f"decode/recurrent_state_layer{layer}"], 2e-5)
    theirs = torch.cat([z[f"decode/conv_state_{name}_layer0"] for name in "qkv"], 1)
    assert_within(cache.layers[0].tail.mT, theirs[..., 1:], 2e-6)


def test_k3_golden_gradients():
    z = golden("kimi_k3_tiny")
    model = K3ForCausalLM(K3Config.from_hf(z.config()))
    load_released(model, z.under("weights/"))
    loss = model.eval()(z["full/input_ids"], labels=z["full/input_ids"]).loss
    assert_within(loss, z["grads/loss"], 1e-6)
    loss.backward()
    ours = {}
    for name, p in model.named_parameters():
        if ".experts." in name:
            stem, letter = name.rsplit(".", 1)
            ours |= {f"{stem}.{e}.{letter}.weight": g for e, g in enumerate(p.grad)}
        else:
            ours[name] = p.grad
    gradients = z.under("grads/")
    del gradients["loss"]
    assert len(gradients) > 70
    for name, expected in gradients.items():
        assert_within(ours[name].view_as(expected), expected, 1e-4)
    assert not [n for n, p in model.named_parameters() if p.grad is None and "layers.0.self_attention_res" not in n]


# ---- Kimi Linear: the same code, other config values ----


def kimi_linear_config(hf):
    """Another library's names for the same settings."""
    full = [i + 1 for i, t in enumerate(hf["layer_types"]) if t == "full_attention"]
    return K3Config.from_hf({
        **{name: hf[name] for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "moe_intermediate_size",
            "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "routed_scaling_factor", "pad_token_id")},
        "num_experts": hf["num_local_experts"], "num_experts_per_token": hf["num_experts_per_tok"],
        "num_shared_experts": hf["n_shared_experts"],
        "first_k_dense_replace": hf["mlp_layer_types"].index("sparse"), "mla_use_output_gate": False, "latent_moe_use_norm": False,
        "linear_attn_config": {
            "kda_layers": [i for i in range(1, hf["num_hidden_layers"] + 1) if i not in full], "full_attn_layers": full,
            "num_heads": hf["linear_num_heads"], "head_dim": hf["linear_head_dim"], "short_conv_kernel_size": hf["linear_conv_kernel_dim"],
            "use_full_rank_gate": False, "gate_lower_bound": None,
        },
    })  # fmt: skip


def kimi_linear_names(tensors):
    """Another library's tensor names and fused tensors (or their gradients), taken apart into ours."""
    out = {}
    for name, t in tensors.items():
        layer = name.rsplit(".self_attn.", 1)[0]
        if name.endswith("self_attn.conv1d.weight"):
            out |= {f"{layer}.self_attn.{x}_conv1d.weight": part for x, part in zip("qkv", t.chunk(3), strict=True)}
        elif name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj").replace(".mlp.", ".block_sparse_moe.")
            out[f"{stem}w1"], out[f"{stem}w3"] = t.chunk(2, 1)
        elif name.endswith("experts.down_proj"):
            out[name.replace(".mlp.", ".block_sparse_moe.").replace("down_proj", "w2")] = t
        else:
            name = name.replace("forget_gate.", "")
            if any(part in name for part in (".mlp.gate.", ".mlp.shared_experts.")):
                name = name.replace(".mlp.", ".block_sparse_moe.")
            out[name] = t.flatten() if name.endswith("A_log") else t
    return out


@pytest.fixture
def kimi_linear():
    z = golden("kimi_linear_tiny")
    model = K3ForCausalLM(kimi_linear_config(z.config()))
    model.load_state_dict(kimi_linear_names(z.under("weights/")))
    return model.eval()


def test_kimi_linear_golden_logits_and_layers(kimi_linear):
    z, prefixes = golden("kimi_linear_tiny"), []
    hooks = [layer.register_forward_hook(lambda m, a, out: prefixes.append(a[0].prefix)) for layer in kimi_linear.model.layers]
    logits = kimi_linear(z["full/input_ids"]).logits
    assert float((logits - z["full/logits"]).detach().abs().max()) < 5e-5
    assert len(hooks) == 4
    for layer in (0, 3):
        torch.testing.assert_close(prefixes[layer], z[f"full/layer{layer}/out"], rtol=0, atol=2e-5)


def test_kimi_linear_golden_decode(kimi_linear):
    z = golden("kimi_linear_tiny")
    ids, cache = z["full/input_ids"], kimi_linear.new_cache(2)
    parts = [kimi_linear(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])]
    assert float((torch.cat(parts, 1) - z["decode/logits"]).detach().abs().max()) < 5e-5


def test_kimi_linear_golden_left_padding(kimi_linear):
    z = golden("kimi_linear_tiny")
    mask = z["leftpad/attention_mask"]
    assert int((mask == 0).sum()) > 0
    logits = kimi_linear(z["full/input_ids"], attention_mask=mask).logits
    assert float((logits - z["leftpad/logits"])[mask == 1].detach().abs().max()) < 5e-5


def test_kimi_linear_golden_gradients(kimi_linear):
    z = golden("kimi_linear_tiny")
    loss = kimi_linear(z["full/input_ids"], labels=z["full/input_ids"]).loss
    assert_within(loss, z["full/loss"], 1e-6)
    loss.backward()
    gradients = kimi_linear_names(z.under("grads/"))
    assert len(gradients) > 30
    for name, expected in gradients.items():
        assert_within(kimi_linear.get_parameter(name).grad, expected, 1e-4)
