"""minimodel: a small but complete Kimi K3 in PyTorch, from the KDA operator to the trained meeting model."""

from minimodel.accounting import cache_bytes, parameter_budget
from minimodel.attention_residuals import attention_residual
from minimodel.cache import HybridCache
from minimodel.config import K3Config
from minimodel.delta_rule import bounded_log_decay, softplus_log_decay
from minimodel.generate import generate
from minimodel.io import from_pretrained, load_released, save_pretrained
from minimodel.kda import KimiDeltaAttention
from minimodel.latent_moe import StableLatentMoE
from minimodel.layers import situ_glu
from minimodel.mla import GatedMLA
from minimodel.model import K3ForCausalLM
from minimodel.muon import PerHeadMuon, newton_schulz
from minimodel.mxfp4 import dequantize_mxfp4, fake_quantize_mxfp4, quantize_mxfp4
from minimodel.prefix_cache import PrefixCache
from minimodel.pretrained import load_pretrained
from minimodel.routing import quantile_bias, route
from minimodel.trace import record

# isort: split
# last, because the module minimodel.kda takes this name when it is first imported
from minimodel.delta_rule import kda

__all__ = [
    "GatedMLA", "HybridCache", "K3Config", "K3ForCausalLM", "KimiDeltaAttention", "PerHeadMuon", "PrefixCache",
    "StableLatentMoE", "attention_residual", "bounded_log_decay", "cache_bytes", "dequantize_mxfp4",
    "fake_quantize_mxfp4", "from_pretrained", "generate", "kda", "load_pretrained", "load_released", "newton_schulz",
    "parameter_budget", "quantile_bias", "quantize_mxfp4", "record", "route", "save_pretrained", "situ_glu",
    "softplus_log_decay",
]  # fmt: skip
