from __future__ import annotations

import pytest

from relayline.wire.envelopes.session_ids import ADAPTER_BITS, ADAPTER_SHIFT, adapter_of, with_adapter
from relayline.wire.model_files.adapter_texts import ADAPTERS_MAX
from relayline.wire.settings.table import ServingSettings


@pytest.mark.parametrize("number", [1, 12 << 32 | 5, (1 << ADAPTER_SHIFT) - 1])
def test_an_id_says_its_adapter_and_keeps_its_number(number: int) -> None:
    assert with_adapter(number, 0) == number
    assert adapter_of(number) == 0
    for adapter in (1, 2, ADAPTER_BITS):
        session_id = with_adapter(number, adapter)
        assert adapter_of(session_id) == adapter
        assert session_id & (1 << ADAPTER_SHIFT) - 1 == number
        assert with_adapter(session_id, adapter) == session_id
        assert session_id < 1 << 64


def test_ids_of_the_last_release_have_no_adapter() -> None:
    """They had 31 random bits from bit 32 on."""
    assert adapter_of(((1 << 31) - 1) << 32 | 7) == 0


def test_there_is_a_number_for_every_adapter() -> None:
    assert ADAPTERS_MAX <= ADAPTER_BITS
    assert (
        len(ServingSettings(lora=",".join(f"a{at}=x.gguf" for at in range(ADAPTERS_MAX))).adapter_names) == ADAPTERS_MAX
    )
