"""A model of transformers whose attention, experts and small tables are replaced."""

from typing import Any

from torch import nn

from accel_ddp.engine.rows import INSTALLED, Rows, RowsCall
from accel_ddp.speed import padding_free
from accel_ddp.speed.comparison import Compared
from accel_ddp.speed.layer_stacks import DROPPED, expert_configs, replace_tables, restore_tables, windows_of
from accel_ddp.speed.padding_free import GROUPED, NAME, NAME_OF_EAGER, NeedsPadding


class CalledModel(Compared, RowsCall):
    """What models that compute without padding share. `check` compares them with padding."""

    is_plain = False  # whether each layer gets the arguments that the model gives it
    shares = False  # whether tokens that two texts share are computed once, in all micro-batches
    why_plain = ""  # why the layers are neither captured nor compiled

    def __init__(self, model: nn.Module, is_sharded: bool):
        """Raise NeedsPadding for models of other kinds. The weights of a model that `is_sharded` exist only inside their layer."""
        from transformers import PreTrainedModel

        owner = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        if owner is None:
            raise NeedsPadding("it is not a transformers model")
        if isinstance(earlier := vars(owner).get(INSTALLED), CalledModel):  # by another run in this process
            earlier.remove()
        RowsCall.__init__(self, model, owner)
        self.model, self.is_sharded = model, is_sharded
        configs = [m.config for m in owner.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
        self.configs = {id(config): (config, config._attn_implementation) for config in configs}
        self.kinds = {kind for _, kind in self.configs.values()}
        if other := self.kinds - {"sdpa", "eager", NAME, NAME_OF_EAGER}:
            raise NeedsPadding(f"its attention is {', '.join(map(str, other))}")
        if any(getattr(config, name, 0) for config, _ in self.configs.values() for name in DROPPED):
            raise NeedsPadding("it skips layers at random (layerdrop)")
        self.expert_configs = expert_configs(owner, [config for config, _ in self.configs.values()])
        self.windows = windows_of(config for config, _ in self.configs.values())
        padding_free.register()
        self.token: Any = None  # of `is_active` during a call

    def install(self) -> None:
        super().install()
        for config, kind in self.configs.values():
            config._attn_implementation = NAME_OF_EAGER if kind == "eager" else NAME
        for config in self.expert_configs:
            config._experts_implementation = NAME
        replace_tables(self.owner)

    def remove(self) -> None:
        for config, kind in self.configs.values():
            config._attn_implementation = kind
        for config in self.expert_configs:
            config._experts_implementation = GROUPED
        restore_tables(self.owner)
        super().remove()
        RowsCall(self.model, self.owner).install()

    def computed(self, rows: Rows) -> Rows:
        return rows if self.shares else rows.apart()
