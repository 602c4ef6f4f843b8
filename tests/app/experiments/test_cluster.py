"""What a run may ask of a Ray cluster."""

from rlsprune.app.experiments.cluster import largest_machine


def test_a_task_gets_no_more_cpus_than_one_live_machine_has() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {"GPU": 1.0}},
    ]
    assert largest_machine(nodes) == 4
    assert largest_machine([]) == 1
