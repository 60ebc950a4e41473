"""What rank 0's machine does while a run trains: processor, memory, disk, network, GPUs; named as MLflow names them.

MLflow's own monitor (3.x, `log_system_metrics`) asks on a thread of its own and hands what it finds straight to the store:
where the store is away it is lost, and threads wait. Here the figures are part of a line of metrics.jsonl and take the way
of every other number.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

SECONDS = 10.0
"""Between two looks; asking a machine with eight GPUs takes milliseconds."""


class SystemMetrics:
    """Looks at the machine, at most once in `SECONDS`.

    Args:
        folder: the run folder; the disk is the one that it lies on.
        device: of this rank.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self._network = psutil.net_io_counters()
        self._next = 0.0
        psutil.cpu_percent()  # the first answer has nothing to compare with
        self._nvml = _open_nvml() if device.type == "cuda" else None

    def read(self) -> dict[str, float]:
        """The figures; empty where the last ones are still fresh."""
        if time.monotonic() < self._next:
            return {}
        self._next = time.monotonic() + SECONDS
        memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(str(self._folder)), psutil.net_io_counters()
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": memory.used / memory.total * 100,
            "process_memory_usage_megabytes": psutil.Process().memory_info().rss / 1e6,
            "disk_usage_percentage": disk.percent,
            "disk_available_megabytes": disk.free / 1e6,
        }
        if network and self._network:  # None on a machine without a network
            found["network_receive_megabytes"] = (network.bytes_recv - self._network.bytes_recv) / 1e6
            found["network_transmit_megabytes"] = (network.bytes_sent - self._network.bytes_sent) / 1e6
        return {name: round(value, 1) for name, value in (*found.items(), *self._gpus())}

    def _gpus(self) -> Iterator[tuple[str, float]]:
        if self._nvml is None:
            if self._device.type == "cuda":
                free, total = torch.cuda.mem_get_info(self._device)
                yield f"gpu_{self._device.index or 0}_memory_usage_megabytes", (total - free) / 1e6
            return
        for number in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(number)
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                yield f"gpu_{number}_memory_usage_megabytes", memory.used / 1e6
                yield f"gpu_{number}_memory_usage_percentage", memory.used / memory.total * 100
                yield f"gpu_{number}_utilization_percentage", self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                yield f"gpu_{number}_power_usage_watts", self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            except self._nvml.NVMLError:  # a figure that this GPU does not have
                continue


def _open_nvml() -> Any:
    """NVIDIA's management library, where `nvidia-ml-py` and the driver are there; else None."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no package, or no driver of its version: training goes on without these figures
        return None
    return pynvml
