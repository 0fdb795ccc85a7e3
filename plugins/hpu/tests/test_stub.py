"""What the stub keeps of Gaudi, in both modes; its conditions for being imported are in ``test_availability.py``."""

import pytest


@pytest.mark.parametrize("mode", [{}, {"PT_HPU_LAZY_MODE": "0", "PT_ENABLE_INT64_SUPPORT": "1"}], ids=["lazy", "eager"])
def test_the_stub_behaves_as_gaudi(python, mode):
    python("stub.py", HABANA_VISIBLE_MODULES=None, MASTER_ADDR=None, MASTER_PORT=None, **mode)
