"""SamplingParams refuses values of the wrong kind by name, so that nothing fails later in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.config import ContextConfig, EngineConfig, from_mapping
from outrider.errors import ConfigError, UnsupportedError
from outrider.types import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "2"),
        ("n", 2.5),
        ("n", True),
        ("temperature", "1"),
        ("temperature", None),
        ("top_k", 2.5),
        ("max_tokens", "3"),
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("seed", "x"),
        ("logprobs", True),
        ("prompt_logprobs", "a"),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [2.5]),
        ("stop_token_ids", "12"),
        ("logit_bias", [1]),
        ("logit_bias", {"1": 2}),
        ("logit_bias", {1: "a"}),
        ("extra_args", None),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"^{field} = ") as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


def test_values_of_numpy_and_of_any_list_are_taken() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5), top_k=np.int64(3), seed=-1, stop_token_ids={1, 2}, banned_token_ids=np.array([3])
    )
    assert params.top_k == 3


def test_a_negative_seed_and_a_config_that_is_no_table_are_refused() -> None:
    with pytest.raises(ConfigError, match="seed = -1 is refused"):
        EngineConfig(seed=-1)
    with pytest.raises(ConfigError, match="context_config = 3 is refused; give a table"):
        from_mapping(ContextConfig, 3, "context_config")  # type: ignore[arg-type]
