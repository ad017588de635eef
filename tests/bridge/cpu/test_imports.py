import importlib.util
import subprocess
import sys

import pytest
from cpu_ranks import on_cpu

from megaboa.bridge.cpu.imports import is_missing


def _transformer_engine():
    import megatron.bridge.peft.lora_layers
    from megatron.bridge.models.deepseek import deepseek_v3_bridge
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import mlp

    return {
        "found": importlib.util.find_spec("transformer_engine") is not None,
        "imported": [name for name in sys.modules if name.startswith("transformer_engine") and sys.modules[name]],
        "lora": megatron.bridge.peft.lora_layers.te.Linear.__name__,
        "have": [module.HAVE_TE for module in (mlp, random, deepseek_v3_bridge)],
    }


def test_transformer_engine_is_there_for_the_lora_layers_only():
    assert on_cpu(_transformer_engine) == [
        {"found": False, "imported": [], "lora": "Linear", "have": [False, False, False]}
    ]


def test_transformer_engine_is_hidden_where_it_is_installed_and_triton_is_there_for_two_modules_only(tmp_path):
    """An image for GPUs has Transformer Engine, and device: cpu must not use it there. Both in one process of 8 s."""
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError('there is no GPU')\n")
    code = f"""
import importlib.util, sys
sys.path[:] = {[str(tmp_path), *sys.path]!r}
assert importlib.util.find_spec("transformer_engine")
sys.modules["triton"] = None                     # as if it were not installed
from megaboa.bridge.cpu import activate
activate()
import megatron.bridge.peft.lora_layers
import megatron.core.transformer.moe.ops.paged_stash
from megatron.core.transformer import mlp
from megatron.core.optimizer import HAVE_EMERGING_OPTIMIZERS
assert HAVE_EMERGING_OPTIMIZERS                  # and so Muon
print(mlp.HAVE_TE, importlib.util.find_spec("transformer_engine"), sys.modules.get("triton"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["False None None"], done.stderr


def _other_names():
    results = {}
    for module in ("modelopt.torch.export", "nvidia_resiliency_ext.checkpointing", "nvidia_resiliency_ext.straggler"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            results[module] = "missing"
    return results


@pytest.mark.skipif(not is_missing("modelopt") or not is_missing("nvidia_resiliency_ext"), reason="both are installed")
def test_what_has_no_stand_in_is_missing_as_before():
    (results,) = on_cpu(_other_names)
    assert list(results.values()) == ["missing"] * 3


def _placeholder():
    from megatron.bridge.recipes import flux
    from megatron.energon import Anything

    class Derived(Anything[int]):
        pass

    with pytest.raises(AttributeError) as error:
        flux.anything().start()
    return issubclass(Derived, Anything), str(error.value)


@pytest.mark.skipif(not is_missing("megatron.energon") or not is_missing("diffusers"), reason="both are installed")
def test_placeholders_can_be_derived_from_but_not_used():
    (answer,) = on_cpu(_placeholder)
    assert answer == (
        True,
        "megatron.bridge.recipes.flux.anything is a stand-in of the CPU backend: "
        "install megatron.bridge.recipes.flux to use start",
    )
