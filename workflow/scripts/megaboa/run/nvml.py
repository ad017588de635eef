"""The part of NVIDIA's management library that GPU samples need, by ctypes, because the ranks' Python may lack
nvidia-ml-py. Standard library only.

Values that this GPU, driver or user can't get are None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import byref, c_char, c_double, c_int, c_int64, c_uint, c_uint32, c_uint64, c_ulong, c_ulonglong, c_void_p
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
# nvml.h
_TEMPERATURE_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_CORRECTED, _UNCORRECTED = 0, 1
_SINCE_DRIVER_LOAD = 0
_FIELD_MEMORY_TEMPERATURE = 82
# Sums over all links: CRC errors of control and data, replays, recoveries, ECC errors.
_FIELDS_NVLINK_ERRORS = (38, 45, 52, 59, 160)
_MOST_NVLINKS = 18
_WORDS_OF_PROCESSORS = 64  # of 64 bits
_FUNCTION_NOT_FOUND = 13
_GONE = {15: "the GPU is lost", 16: "the GPU requires a reset", 999: "unknown error"}


class NvmlError(Exception):
    """The reason why the driver can't be asked."""


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (("legacy", c_char * 16), ("numbers", c_uint * 5), ("address", c_char * 32))


class _Value(ctypes.Union):
    _fields_ = (
        ("double", c_double),
        ("uint", c_uint),
        ("ulong", c_ulong),
        ("ulonglong", c_ulonglong),
        ("longlong", c_int64),
        ("int", c_int),
        ("ushort", ctypes.c_ushort),
    )


class _Field(ctypes.Structure):
    _fields_ = (
        ("field", c_uint32),
        ("scope", c_uint32),
        ("time", c_int64),
        ("latency", c_int64),
        ("type", c_int),
        ("result", c_int),
        ("value", _Value),
    )


class Nvml:
    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NvmlError(f"{LIBRARY} can't be loaded, a part of the driver: {error}") from None
        if code := self._call("nvmlInit_v2"):
            raise NvmlError(f"the driver doesn't answer: {self._text(code)}")

    def gpus(self) -> list[Gpu]:
        """The GPUs that this process may see, in the driver's order."""
        count = c_uint()
        if code := self._call("nvmlDeviceGetCount_v2", byref(count)):
            raise NvmlError(f"the driver can't count its GPUs: {self._text(code)}")
        return [Gpu(self, index) for index in range(count.value)]

    @property
    def driver(self) -> str | None:
        return self.text("nvmlSystemGetDriverVersion")

    def text(self, name: str, *before: Any) -> str | None:
        buffer = ctypes.create_string_buffer(96)
        return None if self._call(name, *before, buffer, c_uint(96)) else buffer.value.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return _FUNCTION_NOT_FOUND  # missing in this version of the driver
        function.restype = c_int
        return function(*arguments)

    def _text(self, code: int) -> str:
        try:
            said = self._library.nvmlErrorString
        except AttributeError:
            return f"error {code}"
        said.restype = ctypes.c_char_p
        return (said(c_int(code)) or b"").decode(errors="replace") or f"error {code}"


class Gpu:
    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml, self.index, self._handle = nvml, index, c_void_p()
        self.error: str | None = None  # set if the GPU no longer answers, by the latest query
        self._note(nvml._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(self._handle)))

    @property
    def uuid(self) -> str | None:
        return self._said("nvmlDeviceGetUUID")

    @property
    def name(self) -> str | None:
        return self._said("nvmlDeviceGetName")

    @property
    def pci(self) -> str | None:
        found = _Pci()
        return found.address.decode() if self._asked("nvmlDeviceGetPciInfo_v3", byref(found)) else None

    @property
    def limit_watts(self) -> float | None:
        return _thousandth(self._number("nvmlDeviceGetEnforcedPowerLimit"))

    @property
    def default_limit_watts(self) -> float | None:
        return _thousandth(self._number("nvmlDeviceGetPowerManagementDefaultLimit"))

    @property
    def most_sm_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetMaxClockInfo", c_int(_CLOCK_SM))

    @property
    def utilisation(self) -> int | None:
        found = _Utilisation()
        return found.gpu if self._asked("nvmlDeviceGetUtilizationRates", byref(found)) else None

    @property
    def watts(self) -> float | None:
        return _thousandth(self._number("nvmlDeviceGetPowerUsage"))

    @property
    def celsius(self) -> int | None:
        return self._number("nvmlDeviceGetTemperature", c_int(_TEMPERATURE_GPU))

    @property
    def memory_celsius(self) -> int | None:
        [found] = self._fields((_FIELD_MEMORY_TEMPERATURE,))
        return found

    @property
    def sm_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", c_int(_CLOCK_SM))

    @property
    def memory_mhz(self) -> int | None:
        return self._number("nvmlDeviceGetClockInfo", c_int(_CLOCK_MEMORY))

    @property
    def used_mib(self) -> int | None:
        found = _Memory()
        return found.used >> 20 if self._asked("nvmlDeviceGetMemoryInfo", byref(found)) else None

    @property
    def reasons(self) -> int | None:
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # new, old
        found = (self._number(name, kind=c_ulonglong) for name in names)
        return next((bits for bits in found if bits is not None), None)

    @property
    def ecc_corrected(self) -> int | None:
        return self._ecc(_CORRECTED)

    @property
    def ecc_uncorrected(self) -> int | None:
        return self._ecc(_UNCORRECTED)

    @property
    def nvlink_errors(self) -> int | None:
        """Errors of all kinds on all links since the driver was loaded."""
        return _sum_of_known(self._fields(_FIELDS_NVLINK_ERRORS))

    @property
    def nvlinks(self) -> int | None:
        """Number of active links; None if it has none."""
        return _sum_of_known(self._number("nvmlDeviceGetNvLinkState", c_uint(link)) for link in range(_MOST_NVLINKS))

    @property
    def pcie_lanes(self) -> int | None:
        return self._number("nvmlDeviceGetCurrPcieLinkWidth")

    @property
    def most_pcie_lanes(self) -> int | None:
        """The maximum for this GPU in this slot."""
        return self._number("nvmlDeviceGetMaxPcieLinkWidth")

    @property
    def pcie_replays(self) -> int | None:
        """Count since the driver was loaded."""
        return self._number("nvmlDeviceGetPcieReplayCounter")

    @property
    def processors(self) -> set[int]:
        """Processors near the GPU; empty if the driver doesn't report them."""
        words = (c_ulong * _WORDS_OF_PROCESSORS)()
        if not self._asked("nvmlDeviceGetCpuAffinity", c_uint(_WORDS_OF_PROCESSORS), words):
            return set()
        bits = 8 * ctypes.sizeof(c_ulong)
        return {bits * word + bit for word, value in enumerate(words) for bit in range(bits) if value >> bit & 1}

    def _ecc(self, kind: int) -> int | None:
        return self._number("nvmlDeviceGetTotalEccErrors", c_int(kind), c_int(_SINCE_DRIVER_LOAD), kind=c_uint64)

    def _fields(self, numbers: tuple[int, ...]) -> list[int | None]:
        asked = (_Field * len(numbers))()
        for one, number in zip(asked, numbers, strict=True):
            one.field = number
        if not self._asked("nvmlDeviceGetFieldValues", c_int(len(numbers)), asked):
            return [None] * len(numbers)
        kinds = [name for name, _ in _Value._fields_]
        good = [one.result == 0 and one.type in range(1, len(kinds)) for one in asked]
        return [getattr(one.value, kinds[one.type]) if fine else None for one, fine in zip(asked, good, strict=True)]

    def _said(self, name: str) -> str | None:
        return self._nvml.text(name, self._handle) if self._handle else None

    def _number(self, name: str, *arguments: Any, kind: Any = c_uint) -> int | None:
        found = kind()
        return found.value if self._asked(name, *arguments, byref(found)) else None

    def _asked(self, name: str, *arguments: Any) -> bool:
        return bool(self._handle) and self._note(self._nvml._call(name, self._handle, *arguments))

    def _note(self, code: int) -> bool:
        if code in _GONE:
            self.error = _GONE[code]
        return code == 0


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _sum_of_known(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
