"""The machine: a device with a name and free memory."""

from __future__ import annotations

from surgery.run.machine import GIB, Machine, find_machine


def test_the_machine_has_memory() -> None:
    machine = find_machine()
    assert machine.memory > 2**20 and machine.memory_gib > 0 and machine.name and machine.count >= 1


def test_memory_is_rounded_down() -> None:
    assert Machine("", GIB * 299 // 100, 1, False).memory_gib == 2.9
    assert Machine("", 1, 1, False).memory_gib == 0.1
