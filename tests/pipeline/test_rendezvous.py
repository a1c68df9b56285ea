"""Who this process is, and waiting for the others."""

import threading

import pytest

from pipeline import rendezvous
from pipeline.core.errors import UserError
from pipeline.rendezvous import Membership
from pipeline.training_settings import Cluster


def test_one_process_needs_no_launcher(tmp_path):
    member = rendezvous.membership(Cluster(), {})
    assert member == Membership(process=0, processes=1)
    rendezvous.meet(tmp_path, member, "start", timeout_s=0.1)
    assert list(tmp_path.iterdir()) == []


def test_several_processes_need_one():
    with pytest.raises(UserError, match="launcher = 'none': set launcher"):
        rendezvous.membership(Cluster(processes=2), {})


def test_slurm():
    variables = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "tpu[003-006,9],other",
        "SLURM_JOB_ID": "4097",
    }
    member = rendezvous.membership(Cluster(launcher="slurm"), variables)
    assert member == Membership(process=3, processes=4, coordinator="tpu003:61441")
    del variables["SLURM_NTASKS"]
    with pytest.raises(UserError, match=r"SLURM_NTASKS is not set.*srun"):
        rendezvous.membership(Cluster(launcher="slurm"), variables)


def test_gke_tpu_slice_and_indexed_job():
    cluster = Cluster(launcher="gke")
    member = rendezvous.membership(
        cluster, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a.svc,b.svc"}
    )
    assert member == Membership(process=1, processes=2, coordinator="a.svc:8476")
    member = rendezvous.membership(
        cluster,
        {
            "JOB_COMPLETION_INDEX": "2",
            "DRAFTMESH_PROCESSES": "3",
            "DRAFTMESH_COORDINATOR": "job-0:1234",
        },
    )
    assert member == Membership(process=2, processes=3, coordinator="job-0:1234")
    with pytest.raises(UserError, match="JOB_COMPLETION_INDEX is not set"):
        rendezvous.membership(cluster, {})


def test_explicit_variables_win_over_the_config():
    cluster = Cluster(launcher="explicit", processes=2, process=0, coordinator="a:1")
    assert rendezvous.membership(cluster, {"DRAFTMESH_PROCESS": "1"}).process == 1
    with pytest.raises(UserError, match=r"DRAFTMESH_PROCESS = 7 must lie in 0\.\.1"):
        rendezvous.membership(cluster, {"DRAFTMESH_PROCESS": "7"})
    with pytest.raises(UserError, match="host:port"):
        rendezvous.membership(cluster, {"DRAFTMESH_COORDINATOR": "a"})


def meet_all(run_dir, processes, timeout_s, present=None):
    """What each present process ran into, None where it met all."""
    results: dict[int, UserError | None] = {}

    def one(process: int) -> None:
        try:
            rendezvous.meet(
                run_dir, Membership(process=process, processes=processes), "start", timeout_s
            )
            results[process] = None
        except UserError as error:
            results[process] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in present or range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_meet_and_can_meet_again(tmp_path):
    for _ in range(2):
        assert meet_all(tmp_path, 4, 60) == dict.fromkeys(range(4))


def test_the_missing_are_named_although_they_came_to_an_earlier_launch(tmp_path):
    assert meet_all(tmp_path, 4, 60) == dict.fromkeys(range(4))
    results = meet_all(tmp_path, 4, 0.6, present=(0, 2))
    assert set(results) == {0, 2}
    for error in results.values():
        assert "process 1, 3 of 4 did not arrive" in str(error)
