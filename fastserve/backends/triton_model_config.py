"""What auto_complete_config() is given and gives back: the configuration, and what may be said about it.

A model fills in what its config.pbtxt leaves open, and contradicts nothing that stands there: every method
raises ValueError where it would, as Triton's does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastserve.backends.triton_types import BY_CONFIG_NAME

_NEEDED = ("name", "data_type", "dims")
_ALLOWED = {"input": (*_NEEDED, "optional"), "output": _NEEDED}
_UNSAID: tuple[Any, ...] = (None, "", "TYPE_INVALID", [])


class ModelConfig:
    """See above."""

    def __init__(self, model_config: str | Mapping[str, Any]) -> None:
        given = json.loads(model_config) if isinstance(model_config, str) else model_config
        self._config: dict[str, Any] = json.loads(json.dumps(given))

    def as_dict(self) -> dict[str, Any]:
        """The whole configuration as it stands."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Not below what the configuration says."""
        said = int(self._config.get("max_batch_size") or 0)
        if said > max_batch_size:
            self._contradicts(f"max_batch_size is {said}, not {max_batch_size}")
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Unless it says so already; not beside another scheduler."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other) is not None:
                self._contradicts(f"{other} and dynamic_batching exclude each other")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """{"decoupled": True} or False."""
        wanted = dict(transaction_policy_dict)
        if set(wanted) - {"decoupled"}:
            self._contradicts(f"model_transaction_policy has 'decoupled' alone, not {sorted(wanted)}")
        policy = self._config.setdefault("model_transaction_policy", {})
        for field, value in wanted.items():
            if policy.get(field, value) != value:
                self._contradicts(f"model_transaction_policy: {field} is {policy[field]}, not {value}")
            policy[field] = value

    def add_input(self, input: Mapping[str, Any]) -> None:  # its name there, which a model may say
        """An input {name, data_type, dims, optional}."""
        self._add("input", input)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """An output {name, data_type, dims}."""
        self._add("output", output)

    def _add(self, side: str, entry: Mapping[str, Any]) -> None:
        name = entry.get("name", "")
        for field in entry:
            if field not in _ALLOWED[side]:
                self._contradicts(f"{side} '{name}': {field} is none of {', '.join(_ALLOWED[side])}")
        for field in _NEEDED:
            if field not in entry:
                self._contradicts(f"{side} '{name}': {field} is missing")
        if entry["data_type"] not in BY_CONFIG_NAME:
            self._contradicts(f"{side} '{name}': data_type {entry['data_type']!r} is not known")
        known = self._config.setdefault(side, [])
        said = next((one for one in known if one["name"] == name), None)
        if said is None:
            known.append(dict(entry))
            return
        for field, value in entry.items():
            wanted = list(value) if field == "dims" else value
            if field != "optional" and said.get(field) not in _UNSAID and said[field] != wanted:
                self._contradicts(f"{side} '{name}': {field} is {said[field]}, not {wanted}")
            said[field] = wanted

    def _contradicts(self, what: str) -> None:
        raise ValueError(f"auto_complete_config of model '{self._config.get('name', '')}': {what}")
