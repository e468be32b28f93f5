"""`Optimizer`: one object that steps, zeroes, schedules, scales and saves dense weights and tables."""

from __future__ import annotations

import dataclasses
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from bunkbed.core.optim import Optimizer as UpdateRule
from bunkbed.core.types import Json
from bunkbed.torch.base.ranges import is_profiling, ranged
from bunkbed.torch.base.rules import SETTINGS, rule_of, settings
from bunkbed.torch.layer import TableLayer
from bunkbed.torch.pending import Pending
from bunkbed.torch.pendings import by_anchor, distinct, follow, require_can_follow

_log = logging.getLogger("bunkbed.torch")


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of torch's Optimizer without the decorator that keeps the compiler out of it.

    When it is first called, the decorator imports the compiler, which takes about a second. A program that compiles
    has imported it, and gets the method as it is.
    """
    return method if "torch._dynamo" in sys.modules else getattr(method, "__wrapped__", method)


class _Group(Json):
    """A parameter group that knows which of its values were written."""

    def __init__(self, values: Json) -> None:
        super().__init__(values)
        self.written: set[str] = set()

    def __setitem__(self, key: str, value: object) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def follow(self, key: str, value: object) -> None:
        """Set a value that another group decides."""
        super().__setitem__(key, value)


class _TableGroup:
    """The parameter group of one table: ``{"params": [anchor], "table": name, "optimizer": class, lr,
    ...}``.

    Where the table follows the dense optimizer, a change in the group that held its anchor applies to it, unless the
    same value of this group was written since the last step.

    Args:
        pending: of the table.
        param_name: see torch's ``named_parameters``; None: the groups have no names.
        followed: the dense optimizer and the index of the group that the table follows; None: it follows none.
    """

    def __init__(
        self, pending: Pending, param_name: str | None, followed: tuple[torch.optim.Optimizer, int] | None
    ) -> None:
        self.pending = pending
        #: Why a frozen table cannot follow its group: an error once it is trained.
        self.refused: ValueError | None = None
        self._followed = followed
        definition = pending.table.optimizer
        fields = _fields(definition)
        self.group = _Group(
            {"params": [pending.anchor], "table": pending.name, "optimizer": type(definition).__name__, **fields}
        )
        if param_name is not None:
            self.group["param_names"] = [param_name]  # torch requires them in all groups or in none
        self._names = tuple(name for name in fields if name != "lr")
        self._applied = self._values()
        self._look()

    @property
    def follows(self) -> bool:
        """Whether the table follows the dense optimizer."""
        return self._followed is not None

    def _look(self) -> None:
        """Note what the followed group has now: only later changes apply."""
        self.group.written.clear()
        if self._followed is not None:
            dense, index = self._followed
            group = dense.param_groups[index]
            self._settings, self._rule = settings(group), _fields(rule_of(dense, group, self.pending.name))

    def follow(self, now: Sequence[tuple[object, ...]]) -> None:
        """Take over what changed in the followed group since the last step.

        Args:
            now: the `settings` of each group of the dense optimizer.

        Raises:
            ValueError: the group has a setting that no rule of a table has.
        """
        if self._followed is None:
            return
        if now[self._followed[1]] != self._settings:
            before, written = self._rule, set(self.group.written)
            self._look()
            for name, value in self._rule.items():
                if value != before[name] and name not in written:
                    self.group.follow(name, value)
        elif self.group.written:
            self.group.written.clear()

    def _values(self) -> tuple[Any, ...]:
        return tuple([self.group[name] for name in self._names])

    def apply_hyperparameters(self) -> None:
        """Give the table the values that were changed in the group since the last step, except lr, which each step
        passes.

        Raises:
            ValueError: a value is out of range, or is part of stored state (Adagrad's initial_accumulator).
        """
        values = self._values()
        if values == self._applied:
            return
        changed = {
            name: tuple(new) if name == "betas" else new
            for name, new, old in zip(self._names, values, self._applied, strict=True)
            if new != old
        }
        table = self.pending.table
        if "initial_accumulator" in changed:
            raise ValueError(
                f"table {table.name!r}: initial_accumulator is the start value of stored slots and cannot change "
                f"from {self._applied[self._names.index('initial_accumulator')]} to "
                f"{changed['initial_accumulator']}; make a new table"
            )
        table.optimizer = dataclasses.replace(table.optimizer, **changed)
        self._applied = values

    def load(self, saved: Json) -> None:
        """Set the hyperparameters of a saved group."""
        self.group.update({key: value for key, value in saved.items() if key not in ("params", "table")})
        if "betas" in self.group:
            self.group["betas"] = tuple(self.group["betas"])
        self._look()


class Optimizer(torch.optim.Optimizer):  # type: ignore[misc]  # torch is untyped here
    """A `torch.optim.Optimizer` over a dense optimizer and every table of a model.

    It removes the layers' anchors from the dense optimizer's groups, keeps those groups (the same dicts) as
    its first parameter groups and appends one per table. A layer without ``optimizer=`` follows the group that held
    its anchor: its table has the group's update rule, rate, betas, eps and weight decay (`SGD`, `Adagrad`, `Adam`,
    `AdamW` or `SparseAdam`; a step changes only the rows that it touches), and later changes of the group apply to the
    table. Where a frozen layer cannot follow, only training it is an error. A layer with ``optimizer=`` keeps its own.
    The rule of each table is logged once, at level INFO.

    Schedulers, `torch.amp.GradScaler`, gradient clipping and Lightning's automatic mode work on it
    as on any optimizer; step it instead of `dense`. Changing a hyperparameter in a group takes effect at the
    next step. It owns no rows; several lookups, losses and backward calls before one ``step()`` are one
    update. Not thread-safe. A table has one `Optimizer` at a time; `detach` releases the table, and so does
    deleting the `Optimizer` or the model that it was made for.

    Clip with `torch.nn.utils.clip_grad_norm_` and its 2-norm; with another norm a table still counts with its
    2-norm. Clipping by value is an error at the step. It is seen by the digits of the norm: where gradients are whole
    numbers, as in a test, or the norm is beyond 1e8 or in float32, it may pass for a scaling.

    Args:
        model: the module whose layers are trained.
        dense: the optimizer of all other parameters (``torch.optim.AdamW(model.parameters())``); None if there
            are none or they are stepped separately.
        replace: take tables over from another `Optimizer`, whose next step is then an error. For Lightning's
            ``configure_optimizers``, which a second ``fit`` calls while the first one's optimizers still exist.

    Raises:
        TypeError: `model` is not a module, or `dense` is not an optimizer that steps without a closure, or divides
            anchors over processes.
        ValueError: the model has no trainable layer of `bunkbed.torch`; or a layer follows a group whose optimizer or
            settings (momentum, amsgrad) no rule of a table has; or its rows have the state of another rule, and were
            trained or committed.
        RuntimeError: a table already has an Optimizer.
        ReadOnlyError: a trainable layer's table is open with ``mode="r"``.
    """

    def __init__(
        self, model: torch.nn.Module, dense: torch.optim.Optimizer | None = None, *, replace: bool = False
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Optimizer: model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(dense, Optimizer):
            raise TypeError("Optimizer: dense is a bunkbed.torch.Optimizer already; use that one alone")
        if dense is not None and not isinstance(dense, torch.optim.Optimizer):
            raise TypeError(
                f"Optimizer: dense must be a torch.optim optimizer, got {type(dense).__name__}; write "
                "dense=torch.optim.AdamW(model.parameters())"
            )
        if isinstance(dense, torch.optim.LBFGS):
            raise TypeError(
                "Optimizer: dense=LBFGS evaluates the model several times a step, but rows are updated once a step; "
                "use an optimizer that steps without a closure"
            )
        known = by_anchor()
        _require_whole(dense, known)
        layers = [
            layer
            for layer in model.modules()
            if isinstance(layer, TableLayer) and (layer.table.mode != "r" or layer.anchor.requires_grad)
        ]
        in_model = [layer._pending for layer in layers]
        groups = [] if dense is None else list(dense.param_groups)
        places = {id(p): index for index, group in enumerate(groups) for p in group["params"] if id(p) in known}
        in_dense = [known[anchor] for anchor in places]
        pendings = distinct([*in_model, *(pending for pending in in_dense if pending.table.mode != "r")])
        if not pendings:
            raise ValueError(
                f"Optimizer: {type(model).__name__} has no trainable bunkbed.torch layer; use the dense optimizer by "
                "itself"
            )
        for pending in pendings:
            pending.require_free(replace=replace)
        followed = {
            pending: (dense, places[id(pending.anchor)])
            for pending in pendings
            if dense is not None and pending.maker is not None and id(pending.anchor) in places
        }
        rules: dict[Pending, UpdateRule] = {}
        refused: dict[Pending, ValueError] = {}
        for pending, (optimizer, index) in list(followed.items()):
            try:
                rules[pending] = rule_of(optimizer, groups[index], pending.name)
                require_can_follow(pending, rules[pending])
            except ValueError as error:
                if pending.anchor.requires_grad:
                    raise
                refused[pending] = error
                del followed[pending]
        for pending in followed:
            follow(pending, rules[pending])
        self._dense = dense
        self._tables: list[_TableGroup] = []
        self._started = False
        self._stepping = False
        if dense is not None:
            for group in dense.param_groups:
                _take_anchors(group, known)
            for param in [param for param in dense.state if id(param) in known]:
                del dense.state[param]
        names = {id(param): name for name, param in model.named_parameters()}
        named = any("param_names" in group for group in groups)
        self._tables = [
            _TableGroup(pending, names.get(id(pending.anchor), pending.name) if named else None, followed.get(pending))
            for pending in pendings
        ]
        for table in self._tables:
            table.refused = refused.get(table.pending)
        super().__init__([*groups, *(table.group for table in self._tables)], {})
        self._started = True
        for pending in pendings:
            pending.attach(self, [layer for layer in layers if layer._pending is pending])
        self._refresh()
        self._warns_of_schedule = dense is not None
        for table in self._tables:
            self._log_rule(table)
        if dense is not None:
            self._watch(dense)

    def _follow(self) -> None:
        """Let tables take over what changed in the groups that they follow; many tables may follow one group."""
        if self._dense is not None:
            now = [settings(group) for group in self._dense.param_groups]
            for table in self._tables:
                table.follow(now)

    def _log_rule(self, table: _TableGroup, *, has_followed: bool = False) -> None:
        """Log which rule trains a table, and why."""
        pending, dense = table.pending, type(self._dense).__name__
        rule = pending.table.optimizer
        if table.follows or has_followed:
            _log.info("table %r is trained by %r, which follows its parameter group of %s", pending.name, rule, dense)
        elif table.refused is not None:
            _log.info("table %r is frozen, and could not be trained: %s", pending.name, table.refused)
        elif pending.maker is None:
            _log.info("table %r is trained by its own optimizer %r", pending.name, rule)
        elif self._dense is None:
            _log.info("table %r is trained by %r: its layer has no optimizer=", pending.name, rule)
        else:
            _log.warning(
                "table %r is in no parameter group of %s, so it is trained by %r; make that of model.parameters(), or "
                "give the layer its own: Embedding(..., optimizer=...)",
                pending.name, dense, rule,
            )  # fmt: skip

    def _warn_of_schedule(self, dense: torch.optim.Optimizer) -> None:
        """Log, once, that a scheduler of the dense optimizer alone does not reach a table with its own rule."""
        if not getattr(dense.step, "_wrapped_by_lr_sched", False):
            return
        self._warns_of_schedule = False
        names = [repr(table.pending.name) for table in self._tables if not table.follows]
        if names:
            _log.warning(
                "a learning-rate scheduler changes the dense optimizer, which table %s does not follow; make it "
                "of the bunkbed.torch.Optimizer",
                ", ".join(names),
            )

    def _watch(self, dense: torch.optim.Optimizer) -> None:
        """Register hooks on the dense optimizer that follow its changes; they refer to `self` weakly."""
        this = weakref.ref(self)

        def follow(_: Any) -> None:  # its load_state_dict makes new group dicts
            optimizer = this()
            if optimizer is not None:
                optimizer._refresh()

        def refuse(*_: Any) -> None:
            optimizer = this()
            if optimizer is None or optimizer._stepping:
                return
            for table in optimizer._tables:
                if table.pending.optimizer is optimizer and table.pending.has_rows:
                    raise RuntimeError(
                        f"table {table.pending.name!r} has pending rows, which stepping the dense optimizer alone "
                        "would leave out; step the bunkbed.torch.Optimizer made from it"
                    )

        dense.register_load_state_dict_post_hook(follow)
        dense.register_step_pre_hook(refuse)

    def _refresh(self) -> None:
        """Share the dense optimizer's present groups and state; the order of groups stays."""
        ours = {id(table.group) for table in self._tables}
        dense = [] if self._dense is None else list(self._dense.param_groups)
        remaining = iter(dense)
        groups = []
        for group in self.param_groups:
            groups.append(group if id(group) in ours else next(remaining))
        self.param_groups[:] = [*groups, *remaining]
        if self._dense is not None:
            self.state = self._dense.state
        # Schedulers that cycle momentum read `defaults`: offer only keys that every group has.
        defaults = {} if self._dense is None else dict(self._dense.defaults)
        for key in ("betas", "momentum"):
            defaults.pop(key, None)
            if all(key in group for group in self.param_groups):
                defaults[key] = self.param_groups[0][key]
        self.defaults = {"lr": self.param_groups[0]["lr"], **defaults}

    @property
    def dense(self) -> Any:
        """The dense optimizer, or None."""
        return self._dense

    def detach(self) -> None:
        """Release the tables, so that another `Optimizer` may train them; pending gradients stay."""
        for table in self._tables:
            if table.pending.optimizer is self:
                table.pending.detach()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every table with pending rows once, then the dense weights.

        Args:
            closure: evaluated first, with gradients enabled; its value is returned.

        Raises:
            ValueError: a row gradient is NaN or Inf; nothing was changed.
            RuntimeError: an ``anchor.grad`` was changed other than by scaling it, or another Optimizer took
                over.
        """
        loss = None
        if self._warns_of_schedule:
            assert self._dense is not None
            self._warn_of_schedule(self._dense)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        # All tables are checked before the first change.
        ready = []
        for table in self._tables:
            pending = table.pending
            if pending.optimizer is not self:
                raise RuntimeError(
                    f"table {pending.name!r}: this Optimizer was detached from it, or replaced by another; step that"
                )
            pending.forget_aborted()
            # As torch's optimizers, this steps a gradient that a layer has had since before it was frozen.
            if pending.reconcile() or pending.take_nothing():
                if table.refused is not None:
                    raise table.refused
                pending.require_finite()
                table.apply_hyperparameters()
                ready.append(table)
        # Tables first: if an update fails (a full disk), the dense weights are unchanged.
        together = [table for table in ready if table.pending.steps_joined]
        if len(together) > 1:
            names = ", ".join(table.pending.name for table in together) if is_profiling() else ""
            steps = [(table.pending, float(table.group["lr"])) for table in together]
            ranged("update", names, Pending.update_together, steps)
            ready = [table for table in ready if not table.pending.steps_joined]
        for table in ready:
            ranged("update", table.pending.name, table.pending.update, float(table.group["lr"]))
        if self._dense is not None:
            self._stepping = True
            try:
                self._dense.step()
            finally:
                self._stepping = False
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear dense gradients and drop the tables' pending rows."""
        if self._dense is not None:
            self._dense.zero_grad(set_to_none=set_to_none)
        for table in self._tables:
            anchor = table.pending.anchor
            if set_to_none:
                anchor.grad = None
            elif anchor.grad is not None:
                anchor.grad.zero_()
            table.pending.drop()

    def add_param_group(self, param_group: Json) -> None:
        """Add dense parameters (to `dense`), or layers' anchors (one group per table), or both."""
        if not self._started:
            _undecorated(torch.optim.Optimizer.add_param_group)(self, param_group)
            return
        known = by_anchor()
        params = param_group["params"]
        param_group = {
            **param_group,
            "params": [params] if isinstance(params, torch.Tensor) else list(params),
        }
        found = _take_anchors(param_group, known)
        ours = [table.pending for table in self._tables]
        fresh = [pending for pending in found if not any(pending is own for own in ours)]
        if len(fresh) < len(found):
            raise ValueError(f"table {found[0].name!r} is in a parameter group already")
        for pending in fresh:
            pending.require_free()
        dense = self._dense
        given = {key: value for key, value in param_group.items() if key in SETTINGS}
        rules = {
            pending: rule_of(dense, given, pending.name)
            for pending in fresh
            if dense is not None and pending.maker is not None
        }
        for pending, rule in rules.items():
            require_can_follow(pending, rule)
        if param_group["params"]:
            if self._dense is None:
                raise ValueError(
                    "this Optimizer has no dense optimizer to take parameters; make it with "
                    "dense=torch.optim.AdamW(...)"
                )
            self._dense.add_param_group(param_group)
            self._refresh()
        for pending in fresh:
            if pending in rules:
                follow(pending, rules[pending])
            table = _TableGroup(pending, pending.name if "param_names" in self.param_groups[0] else None, None)
            self._tables.append(table)
            self.param_groups.append(table.group)
            pending.attach(self)
            self._log_rule(table, has_followed=pending in rules)
        self._refresh()

    def state_dict(self) -> Json:
        """Return torch's ``state_dict``; rows and their state are in that of the model."""
        self._follow()  # a scheduler of the dense optimizer may have changed its groups since the last step
        state: Json = _undecorated(torch.optim.Optimizer.state_dict)(self)
        return state

    def load_state_dict(self, state_dict: Json) -> None:
        """Load dense state and all hyperparameters; the layers' ``load_state_dict`` loads rows and their
        slots.

        Raises:
            ValueError: the number of groups differs, or a table's group was saved for another optimizer.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"the state dict has {len(saved)} parameter groups, this Optimizer {len(self.param_groups)} "
                f"({len(self._tables)} of tables)"
            )
        tables = {id(table.group): table for table in self._tables}
        dense_groups, table_groups = [], []
        for group, new in zip(self.param_groups, saved, strict=True):
            table = tables.get(id(group))
            if table is None:
                dense_groups.append(new)
                continue
            if new.get("optimizer") != group["optimizer"]:
                raise ValueError(
                    f"table {table.pending.name!r}: its parameter group was saved for {new.get('optimizer')}, but it "
                    f"is trained with {group['optimizer']}"
                )
            table_groups.append((table, new))
        if self._dense is not None:
            self._dense.load_state_dict({**state_dict, "param_groups": dense_groups})
        for table, new in table_groups:
            table.load(new)
        self._refresh()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "bunkbed.torch.Optimizer cannot be copied or pickled: it steps tables, which have one writer; save its "
            "state_dict()"
        )


def _fields(definition: UpdateRule) -> Json:
    return {field.name: getattr(definition, field.name) for field in dataclasses.fields(definition)}


def _require_whole(dense: torch.optim.Optimizer | None, known: dict[int, Pending]) -> None:
    """Raise TypeError for an optimizer that divides its parameters over processes, and has an anchor among them."""
    if dense is None or type(dense).__name__ != "ZeroRedundancyOptimizer":
        return
    # Its groups on each process have a part of the parameters, and `_all_params` has all.
    if any(id(param) in known for param in dense._all_params):
        raise TypeError(
            "Optimizer: dense=ZeroRedundancyOptimizer divides its parameters over the processes, and anchors must stay "
            "on each; leave them out: anchors = bunkbed.torch.anchors(model), then "
            "ZeroRedundancyOptimizer([p for p in model.parameters() if p not in anchors], ...)"
        )


def _take_anchors(group: Json, known: dict[int, Pending]) -> list[Pending]:
    """Remove anchors, and their names if present, from a parameter group; return the `Pending` of each."""
    params: Iterable[Any] = group["params"]
    # add_param_group also accepts the (name, parameter) pairs of Module.named_parameters.
    bare = [param[1] if isinstance(param, tuple) else param for param in params]
    keep = [id(param) not in known for param in bare]
    found = [known[id(param)] for param in bare if id(param) in known]
    if found:
        group["params"] = [param for param, kept in zip(params, keep, strict=True) if kept]
        if "param_names" in group:
            group["param_names"] = [n for n, kept in zip(group["param_names"], keep, strict=True) if kept]
    return distinct(found)
