"""The Live page on a machine with two GPUs: a library that answers as NVIDIA's driver does stands in for them."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.browsing import DESKTOP, PHONE, in_a_browser, looking_at
from tests.serve.running_server import RunningServer
from tests.serve.tiny_model import save_tiny_model

pytestmark = [
    *in_a_browser,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the driver's stand-in"),
]

DRIVER = """
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
static int numbers[2] = {0, 1};
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &numbers[index]; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, utilization *answer) {
  answer->gpu = *(int *)device ? 92 : 37;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *answer) {
  answer->total = 150ull << 30;
  answer->used = (*(int *)device ? 120ull : 80ull) << 30;
  answer->free = answer->total - answer->used;
  return 0;
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    name = "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", name, "driver.c"], cwd=folder, check=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(folder))
        running = RunningServer(str(save_tiny_model(folder / "model")))
    try:
        yield running
    finally:
        running.end()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "screen", [pytest.param(DESKTOP, id="desktop", marks=pytest.mark.long), pytest.param(PHONE, id="phone")]
)
def test_live_shows_each_gpu(
    browser: Any, server: RunningServer, screen: dict[str, Any], scheme: str, tmp_path: Path
) -> None:
    with looking_at(browser, server, "/live", screen | {"color_scheme": scheme}) as page:
        for name, use, used in (("GPU 0", "37", "80"), ("GPU 1", "92", "120")):
            shown = page.locator(".tile", has_text=f"{name} use")
            shown.wait_for()
            assert use in shown.inner_text()
            memory = page.locator(".tile", has_text=f"{name} memory")
            assert used in memory.inner_text() and "150" in str(memory.get_attribute("data-tip"))
        chart = page.locator(".card", has_text="CPU, memory and GPU use")
        for name in ("CPU", "memory", "GPU 0", "GPU 1"):
            chart.get_by_text(name, exact=True).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        page.screenshot(path=tmp_path / "live.png", full_page=True)
