"""A worker of pytest-xdist tells its controller of a test's call, and of its set-up and end if they did not pass.

xdist sends five messages for each test, and writes and reads them in Python: ten CPU seconds for a whole run.
"""

import pytest
from _pytest.runner import runtestprotocol


class ShortReports:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        return True


def are_enough(config: pytest.Config) -> bool:
    """In a worker, unless somebody wants to know how long everything took."""
    wants_all = config.getoption("durations", None) or config.getoption("xmlpath", None)
    return hasattr(config, "workerinput") and not wants_all
