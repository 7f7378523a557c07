"""P-nets by name, for any task with matching inputs. A new kind of p-net is one file and one entry in `PNETS`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import nn

from gbfunc.tasks.pnets import base
from gbfunc.tasks.pnets.actors import actor_critic, conv_actor_critic, recurrent_actor_critic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, narrowed
from gbfunc.tasks.pnets.convnets import all_conv, convnet, lenet5, resnet18, resnet20, resnet56
from gbfunc.tasks.pnets.gpt import gpt, vit
from gbfunc.tasks.pnets.hugging_face import PREFIX, hugging_face
from gbfunc.tasks.pnets.mlp import mlp, mlp_pnet

__all__ = ["PNETS", "Interface", "PNet", "PlanOptions", "find_pnet", "mlp", "narrowed"]

PNETS: Mapping[str, Callable[..., PNet]] = MappingProxyType(
    {
        "mlp": mlp_pnet,
        "convnet": convnet,
        "lenet5": lenet5,
        "allconv": all_conv,
        "resnet18": resnet18,
        "resnet20": resnet20,
        "resnet56": resnet56,
        "vit": vit,
        "gpt": gpt,
        "actor_critic": actor_critic,
        "recurrent_actor_critic": recurrent_actor_critic,
        "conv_actor_critic": conv_actor_critic,
    }
)
"""{name: function `(interface, **options) -> PNet` that describes the p-net}"""


def find_pnet(name: str, interface: Interface, config: Mapping[str, Any]) -> PNet:
    """Find the p-net called `name`: a key of `PNETS`, `hf:TYPE` (see `hugging_face`), or `package.module:function`.

    A user's function takes the options `config`, and `interface` if it has such a parameter. The function returns an
    `nn.Module`, or a `PNet`, which can also set arguments of `make_plan`.
    """
    if name.startswith(PREFIX):
        return hugging_face(interface, name.removeprefix(PREFIX), **config)
    if base.is_import_path(name):
        factory = base.import_factory(name, "an nn.Module")
        options = base.options_for(name, factory, config, interface=interface)
        with base.seeded(0):
            pnet: Any = factory(**options)
        if isinstance(pnet, PNet):
            # Use the path of the user's function as the name, which a genome's file stores to build the p-net again.
            return replace(pnet, name=name, config=config)
        if not isinstance(pnet, nn.Module):
            raise ValueError(f"{name} must return an nn.Module or a PNet, got {type(pnet).__name__}")
        return PNet(name=name, make=lambda: factory(**options), config=config)
    if name not in PNETS:
        raise ValueError(f"no p-net {name!r}: choose one of {', '.join(PNETS)}, hf:TYPE or package.module:function")
    options = base.options_for(f"the p-net {name}", PNETS[name], config, interface=interface)
    base.check_types(name, PNETS[name], config)
    try:
        return PNETS[name](**options)
    except TypeError as error:
        raise ValueError(f"the options of the p-net {name} do not fit: {error}") from error
