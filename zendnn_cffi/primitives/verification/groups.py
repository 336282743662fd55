"""All cases, in groups that run in a process each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zendnn_cffi.primitives.verification.cases import Case


def groups() -> dict[str, Callable[[], Iterator[Case]]]:
    """Return what makes the cases of each group."""
    from zendnn_cffi.primitives.verification import cases_images, cases_others, cases_products, cases_recurrent

    return {**cases_products.GROUPS, **cases_images.GROUPS, **cases_others.GROUPS, **cases_recurrent.GROUPS}
