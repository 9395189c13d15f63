"""A sharded step that is a method: `model.train_step(state, batch)`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class BoundStep(Generic[P, R]):
    """A sharded step bound to the object that it is a method of, which is its first argument.

    An object that is no pytree is static, as under `eqx.filter_jit`: what the step reads of it is fixed when it is
    traced.
    """

    def __init__(self, step: Any, owner: Any):
        functools.update_wrapper(self, step, updated=())
        self.__func__ = step
        self.__self__ = owner

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__func__(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments, laid out as the step wants them."""
        return self.__func__.place(self.__self__, *args, **kwargs)[1:]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__func__, name)
        return self._bound(found) if name in _TAKE_ARGUMENTS else found

    def _bound(self, method: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(method, self.__self__)

    def __repr__(self) -> str:
        return f"<bound {self.__func__!r} of {self.__self__!r}>"


_TAKE_ARGUMENTS = ("plan", "lower", "trace", "eval_shape")
