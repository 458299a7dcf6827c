"""minimodel: a small but complete Kimi K3 in PyTorch, from the KDA operator to the trained meeting model."""

from minimodel.accounting import cache_bytes, parameter_budget
from minimodel.attention_residuals import attention_residual
from minimodel.cache import HybridCache
from minimodel.config import K3Config
from minimodel.delta_rule import bounded_log_decay, kda, softplus_log_decay
from minimodel.kda import KimiDeltaAttention
from minimodel.latent_moe import StableLatentMoE
from minimodel.layers import situ_glu
from minimodel.mla import GatedMLA
from minimodel.model import K3ForCausalLM
from minimodel.routing import quantile_bias, route
from minimodel.trace import record
