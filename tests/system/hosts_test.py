"""Jobs of several launchers on pretend hosts: each has a network, a host name and a process table of its own.

python3 hosts_test.py SOURCE_DIR BUILD_DIR [CASE...]        (as root: the hosts' namespaces need it)
"""
import os
import pathlib
import re
import signal
import sys
import time

from support.hosts import Hosts, report
from support.program import run, run_cases

SOURCE, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
BIN = BUILD / "bin"
LOCKSTEP = BIN / "lockstep"
SAMPLES = SOURCE / "examples/launch"
MEET = ["--rdzv-endpoint", "host1:29400"]
QUICK = "heartbeat_timeout=1,keep_alive_interval=0.2,last_call_timeout=0.2,join_timeout=100"
# What a rank prints before it does as told: which one it is, and in which attempt.
HERE = 'echo "here $RANK of $WORLD_SIZE, node $GROUP_RANK, restart $TORCHELASTIC_RESTART_COUNT"; '
# Far above what is promised (3 s), far below what happens when nobody acts: a busy machine is no failure.
BOUND_S = 40


def launch(hosts, host, script, *flags, ranks=2, nodes=2, meet=MEET, conf=QUICK, **more):
    command = script if isinstance(script, list) else ["sh", "-c", HERE + script]
    return hosts.launch(host, LOCKSTEP, "run", "--nnodes", nodes, "--nproc-per-node", ranks, *meet, "--rdzv-conf", conf,
                        *flags, *command, **more)


def both(hosts, script, *flags, **more):
    return [launch(hosts, host, script, *flags, **more) for host in (1, 2)]


def await_all(launchers, text, count=1):
    for launcher in launchers:
        launcher.await_text(text, count)


def expect_over(since, launchers, what):
    """All have ended, soon after."""
    for launcher in launchers:
        launcher.await_end()
    took = max(launcher.ended_at for launcher in launchers) - since
    report(f"{what}: over on all hosts after {took:.2f} s")
    assert took < BOUND_S, f"{what}: over after {took:.1f} s, expected {BOUND_S} s at most"


def fitted(text):
    """The line with which linear_regression says what it has learnt, without its time."""
    lines = re.findall(r"w = .*|w=.*", text)
    assert lines, f"nothing was learnt:\n{text}"
    return lines[-1]


def test_two_hosts_train_as_one_does(folder):
    with Hosts(folder, 2) as hosts:
        # With heartbeats that a busy machine does not miss while the ranks train.
        first, second = both(hosts, [BIN / "linear_regression", "--epochs", "2"], conf="last_call_timeout=0.2")
        first.expect(0)
        second.expect(0)
        alone = run(LOCKSTEP, "run", "--nproc-per-node", 4, BIN / "linear_regression", "--epochs", "2")
        alone.expect(0)
        # Exactly: over gloo, too, sums are taken in the order of the one tree.
        assert fitted(first.text) == fitted(alone.out), f"{first}\n{alone}"
        hosts.expect_nothing_left()


def test_ranks_find_torchruns_variables(folder):
    script = ('echo "vars $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE '
              '$MASTER_ADDR $TORCHELASTIC_RUN_ID token=${LOCKSTEP_TOKEN:-none}"; echo "port $MASTER_PORT"')
    with Hosts(folder, 2) as hosts:
        first = launch(hosts, 1, script, "--rdzv-id", "mine")
        second = launch(hosts, 2, script, "--rdzv-id", "mine", ranks=1)
        first.expect(0, r"vars 0 3 0 2 0 2 10\.77\.0\.1 mine token=none$", r"vars 1 3 1 2 0 2 10\.77\.0\.1 mine")
        second.expect(0, r"vars 2 3 0 1 1 2 10\.77\.0\.1 mine token=none$")
        assert len(set(re.findall(r"port (\d+)", first.text + second.text))) == 1


def test_static_hosts_and_node_ranks(folder):
    with Hosts(folder, 2) as hosts:
        meet = ["--master-addr", "host2", "--node-rank"]
        second = launch(hosts, 1, "true", meet=[*meet, "1"])
        first = launch(hosts, 2, "true", meet=[*meet, "0"])
        first.expect(0, "here 0 of 4, node 0")
        second.expect(0, "here 3 of 4, node 1")


def test_a_killed_rank_ends_training_everywhere(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, [BIN / "linear_regression", "--epochs", "1000000"])
        await_training(hosts)
        start = time.monotonic()
        hosts.on(2, "pkill", "-KILL", "-o", "-x", "linear_regressi")
        expect_over(start, launchers, "SIGKILL of a rank in training")
        for launcher in launchers:
            launcher.expect(137, r"rank [23] on host2 was killed by SIGKILL|"
                                 r"rank [23] failed first: it was killed by SIGKILL")
        hosts.expect_nothing_left()


def await_training(hosts):
    """Until ranks of both hosts talk to each other: each host has connections of theirs to the other one."""
    await_connections(hosts, 5)


def await_connections(hosts, count):
    for host in (1, 2):
        talking = f"ss -Htn state established dst 10.77.0.{3 - host} | wc -l"
        hosts.on(host, "sh", "-c", f"until test $({talking}) -ge {count}; do sleep 0.01; done")


def test_a_failed_rank_is_named_on_both_hosts(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "test $RANK = 3 && exit 42; exec sleep 1000")
        launchers[0].await_text("here 1 of 4")
        start = time.monotonic()
        expect_over(start, launchers, "exit 42 of a rank")
        launchers[0].expect(42, r"\[lockstep\] rank 3 on host2 exited with status 42 after .* s \(pid")
        launchers[1].expect(42, r"\[lockstep\] rank 3 failed first: it exited with status 42")
        hosts.expect_nothing_left()


def test_ranks_of_other_hosts_know_at_once(folder):
    with Hosts(folder, 2) as hosts:
        watch = f"test $GROUP_RANK = 1 && exec tail -f /dev/null; exec {BIN}/test_launch rank watch"
        launchers = both(hosts, watch)
        await_all(launchers, "here", 2)
        start = time.monotonic()
        hosts.on(2, "pkill", "-KILL", "-o", "-x", "tail")
        launchers[0].await_text(r"rank [01]\] rank 1 (runs|exited)")
        report(f"SIGKILL of a rank: known to those of the other host after {time.monotonic() - start:.3f} s")
        launchers[0].expect(137, "rank 2 on host2 was killed by SIGKILL")


def test_a_name_server_out_of_reach_delays_no_start(folder):
    """As in a laboratory or a vehicle without an uplink. libtorch's store asks for the name of each address it talks
    to: here 60 s."""
    deaf = pathlib.Path(folder) / "resolv.conf"
    deaf.write_text("nameserver 10.77.0.99\noptions timeout:30 attempts:2\n")
    with Hosts(folder, 2) as hosts:
        for host in (1, 2):
            hosts.on(host, "mount", "--bind", deaf, "/etc/resolv.conf")
            # The question leaves, and nobody says that there is nobody.
            hosts.on(host, "ip", "neigh", "add", "10.77.0.99", "lladdr", "02:00:00:00:00:99", "dev", "eth0")
        start = time.monotonic()
        launchers = both(hosts, [BIN / "linear_regression", "--epochs", "1"])
        for launcher in launchers:
            launcher.expect(0)
        took = max(launcher.ended_at for launcher in launchers) - start
        report(f"a job of two hosts without a name server: {took:.2f} s")
        assert took < 40, f"{took:.1f} s: somebody waited for a name server"


def test_a_host_that_knows_itself_by_loopback_serves_the_others(folder):
    """As Debian's do: 127.0.1.1 for their own name. MASTER_ADDR is often the name of a batch job's first host."""
    own = pathlib.Path(folder) / "hosts.own"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n10.77.0.2 host2\n")
    with Hosts(folder, 2) as hosts:
        hosts.on(1, "mount", "--bind", own, "/etc/hosts")
        ranks = hosts.start_ranks([BIN / "linear_regression", "--epochs", "1"], 1, MASTER_ADDR="host1",
                                  LOCKSTEP_TIMEOUT="20")
        for rank in ranks:
            out, errors = rank.communicate(timeout=60)
            assert rank.returncode == 0, out + errors


def test_ranks_that_wait_for_a_lost_host_say_which(folder):
    # As they start, perhaps before they have loaded the library: then only the launcher says it. As they
    # connect, in training.
    for connections in (1, 3, 5):
        aborted = r"^\[rank {}\] .*was aborted \(" if connections > 1 else ""
        with Hosts(folder, 2) as hosts:
            launchers = both(hosts, f"exec {BIN}/linear_regression --epochs 1000000")
            await_all(launchers, "here", 2)
            await_connections(hosts, connections)
            hosts.do("cut", 2)
            launchers[0].expect(1, aborted.format("[01]") + r"host2 .* was lost: no sign of life for 1 s")
            launchers[1].expect(1, aborted.format("[23]") + r"lost the connection to the coordinator at host1:29400")
            hosts.expect_nothing_left()


def test_ranks_that_ignore_sigterm_end_on_every_host(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "trap '' TERM; test $RANK = 0 && exit 3; while :; do sleep 1000; done")
        launchers[1].await_text("here 3 of 4")
        expect_over(time.monotonic(), launchers, "a rank fails, the others ignore SIGTERM")
        launchers[1].expect(3, "rank 0 on host1 exited with status 3", "did not stop in time, killed by the launcher")
        hosts.expect_nothing_left()


def test_a_host_that_hears_of_a_start_and_of_its_end_at_once(folder):
    # As on a busy machine: host2's launcher is stopped while the others say both.
    script = "trap '' TERM; test $RANK = 0 && exit 3; while :; do sleep 1000; done"
    slow = dict(nodes=3, ranks=1, conf="heartbeat_timeout=60,keep_alive_interval=1")
    with Hosts(folder, 3) as hosts:
        launchers = [launch(hosts, host, script, **slow) for host in (1, 2)]
        launchers[1].await_text("joined the job")
        hosts.on(2, "pkill", "-STOP", "-x", "lockstep")
        launchers.append(launch(hosts, 3, script, **slow))
        launchers[0].await_text("rank 0.* exited with status 3")
        os.killpg(launchers[1].process.pid, signal.SIGCONT)  # nsenter has stopped with it
        expect_over(time.monotonic(), launchers, "start and stop heard at once")
        launchers[1].expect(3, "rank 0 on host1 exited with status 3")
        hosts.expect_nothing_left()


def test_a_killed_launcher_ends_the_job(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "exec sleep 1000")
        await_all(launchers, "here", 2)
        start = time.monotonic()
        hosts.on(2, "pkill", "-KILL", "-x", "lockstep")
        expect_over(start, launchers, "SIGKILL of host2's launcher")
        launchers[0].expect(1, r"host2 \(10\.77\.0\.2\) was lost: its launcher has ended, or was cut off")
        hosts.expect_nothing_left()


def test_a_killed_coordinator_ends_the_job(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "exec sleep 1000", "--max-restarts", 3)
        await_all(launchers, "here", 2)
        start = time.monotonic()
        hosts.on(1, "pkill", "-KILL", "-x", "lockstep")
        expect_over(start, launchers, "SIGKILL of the coordinator")
        launchers[1].expect(1, "the coordinator at host1:29400 has ended")
        hosts.expect_nothing_left()


def test_a_host_that_is_cut_off_ends_as_the_others_do(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "exec sleep 1000")
        await_all(launchers, "here", 2)
        start = time.monotonic()
        hosts.do("cut", 2)
        expect_over(start, launchers, "a cable pulled, heartbeat_timeout=1")
        launchers[0].expect(1, r"host2 \(10\.77\.0\.2\) was lost: no sign of life for 1 s")
        launchers[1].expect(1, "lost the connection to the coordinator at host1:29400: no answer for 1 s")
        hosts.expect_nothing_left()


def test_a_short_cut_is_no_failure(folder):
    with Hosts(folder, 2) as hosts:
        go = folder + "/go"
        launchers = both(hosts, f"until test -e {go}; do sleep 0.05; done",
                         conf="heartbeat_timeout=60,keep_alive_interval=0.1")
        await_all(launchers, "here", 2)
        hosts.do("cut", 2)
        hosts.do("drop", 1, 2)
        hosts.do("mend", 2)
        hosts.do("undrop")
        pathlib.Path(go).touch()
        for launcher in launchers:
            launcher.expect(0)


def test_training_starts_again_after_a_failure(folder):
    with Hosts(folder, 2) as hosts:
        script = f"test $RANK$TORCHELASTIC_RESTART_COUNT = 20 && exit 9; exec {BIN}/linear_regression --epochs 1"
        launchers = both(hosts, script, "--max-restarts", 1)
        for launcher in launchers:
            launcher.expect(0, "rank 2 on host2 exited with status 9 .*; restart 1 of 1, now", "restart 1$")
        fitted(launchers[0].text)
        hosts.expect_nothing_left()


def test_a_host_that_lost_power_comes_back_to_its_ranks(folder):
    with Hosts(folder, 2) as hosts:
        script = "test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000"
        launchers = both(hosts, script, "--max-restarts", 1)
        await_all(launchers, "here", 2)
        start = time.monotonic()
        hosts.do("off", 2)
        hosts.do("on", 2)
        again = launch(hosts, 2, script, "--max-restarts", 1)
        again.expect(0, "here 3 of 4, node 1, restart 1")
        launchers[0].expect(0, "host2 .* was lost", "here 0 of 4, node 0, restart 1")
        report(f"power off and on again: the second start was over after {again.ended_at - start:.2f} s")
        hosts.expect_nothing_left()


def test_a_host_that_lost_its_address_for_a_moment_comes_back(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "test $TORCHELASTIC_RESTART_COUNT = 1 || exec sleep 1000", "--max-restarts", 1)
        await_all(launchers, "here", 2)
        hosts.on(2, "ip", "addr", "del", "10.77.0.2/24", "dev", "eth0")
        launchers[1].await_text(r"no port to listen on at 10\.77\.0\.2: ")
        hosts.on(2, "ip", "addr", "add", "10.77.0.2/24", "dev", "eth0")
        launchers[0].expect(0, "host2 .* was lost", "here 0 of 4, node 0, restart 1")
        launchers[1].expect(0, "here 3 of 4, node 1, restart 1")


def test_a_coordinator_with_several_addresses_is_found_by_any(folder):
    with Hosts(folder, 2) as hosts:
        for dead in ("10.77.0.3", "10.99.0.1"):  # nobody has it; no route leads there
            with open(hosts.folder + "/hosts", "a", encoding="ascii") as names:
                names.write(f"{dead} leader\n")
        for host in (1, 2):
            hosts.on(host, "ip", "addr", "add", f"fd00:77::{host}/64", "dev", "eth0", "nodad")
        for alive, name in (("10.77.0.1", "leader"), ("fd00:77::1", "six"), ("10.99.0.1", "six")):
            with open(hosts.folder + "/hosts", "a", encoding="ascii") as names:
                names.write(f"{alive} {name}\n")
        for name in ("leader", "six"):
            for launcher in both(hosts, "true", meet=["--rdzv-endpoint", f"{name}:29400"]):
                launcher.expect(0)


def test_a_host_may_be_late(folder):
    with Hosts(folder, 2) as hosts:
        second = launch(hosts, 2, "true")  # before there is anybody to meet
        first = launch(hosts, 1, "true")
        first.expect(0, "here 0 of 4, node 0")
        second.expect(0, "here 3 of 4, node 1")


def test_a_second_host_joins_at_a_restart(folder):
    with Hosts(folder, 2) as hosts:
        script = "test $WORLD_SIZE = 4 || exec sleep 1000"
        first = launch(hosts, 1, script, nodes="1:2")
        first.await_text("here 1 of 2, node 0, restart 0")
        start = time.monotonic()
        second = launch(hosts, 2, script, nodes="1:2")
        second.expect(0, "here 3 of 4, node 1, restart 1")
        first.expect(0, "host2 joins", "here 0 of 4, node 0, restart 1")
        report(f"a host joins: both ran and ended {second.ended_at - start:.2f} s after its start")


def test_a_job_goes_on_without_a_lost_host(folder):
    with Hosts(folder, 3) as hosts:
        script = "test $WORLD_SIZE = 2 || exec sleep 1000"
        three = [launch(hosts, host, script, "--max-restarts", 1, ranks=1, nodes="2:3") for host in (1, 2, 3)]
        for launcher in three:
            launcher.await_text("here . of 3")
        hosts.do("off", 2)
        three[0].expect(0, "host2 .* was lost", "here 0 of 2, node 0, restart 1")
        three[2].expect(0, "here 1 of 2, node 1, restart 1")


def test_a_missing_host_is_an_error_that_says_who_is_here(folder):
    with Hosts(folder, 1) as hosts:
        launcher = launch(hosts, 1, "true", conf="join_timeout=0.3")
        launcher.expect(1, r"1 of 2 hosts came within 0\.3 s \(here: host1\)")


def test_a_signal_to_one_launcher_ends_all(folder):
    with Hosts(folder, 2) as hosts:
        launchers = both(hosts, "trap 'echo saved $RANK; exit 0' TERM; while :; do sleep 0.01; done")
        await_all(launchers, "here", 2)
        hosts.on(2, "pkill", "-TERM", "-x", "lockstep")
        for rank, launcher in ((0, launchers[0]), (3, launchers[1])):
            launcher.expect(143, f"saved {rank}$", "the launcher on host2 got SIGTERM")
        hosts.expect_nothing_left()


def test_a_second_interrupt_kills_the_ranks_of_all_hosts(folder):
    with Hosts(folder, 2) as hosts:
        # Asked is said more than 0.2 s after the first: a second one before is the same press.
        rank = "trap '' TERM; trap 'sleep 0.6; echo asked' INT; echo ready; while :; do sleep 1000; done"
        launchers = both(hosts, rank, "--grace", 600)
        await_all(launchers, "ready", 2)
        start = time.monotonic()
        hosts.on(2, "pkill", "-INT", "-x", "lockstep")
        launchers[1].await_text("SIGINT: asking 2 ranks to stop")
        launchers[1].await_text("asked", 2)
        hosts.on(2, "pkill", "-INT", "-x", "lockstep")
        expect_over(start, launchers, "two interrupts")
        for launcher in launchers:
            launcher.expect(130, "the launcher on host2 got SIGINT")
        hosts.expect_nothing_left()


def test_a_signal_after_a_failure_ends_all_and_nothing_is_restarted(folder):
    for signalled in (1, 2):  # the host of the failed rank, and the other one
        with Hosts(folder, 2) as hosts:
            # The others have seen the failure, and do not stop before they may.
            go = folder + "/go" + str(signalled)
            others = f"{BIN}/test_launch rank watch; trap '' TERM; echo known; until test -e {go}; do sleep 0.02; done"
            launchers = both(hosts, f"test $RANK = 3 && exit 9; {others}", "--max-restarts", 2, "--grace", 60)
            await_all(launchers, "known")
            hosts.on(signalled, "pkill", "-TERM", "-x", "lockstep")
            launchers[signalled - 1].await_text("no rank is started again")
            pathlib.Path(go).touch()
            for launcher in launchers:
                launcher.expect(143, f"the launcher on host{signalled} got SIGTERM")
                assert "restart 1" not in launcher.text, launcher
            hosts.expect_nothing_left()


def sample(hosts, host, *words, **variables):
    """A script of examples/launch, on a host, with `lockstep` in PATH."""
    path = f"{BIN}:{os.environ['PATH']}"
    return hosts.launch(host, *words, PATH=path, RANKS="2", **variables)


def test_sample_scripts_for_one_machine(folder):
    with Hosts(folder, 1) as hosts:
        sample(hosts, 1, SAMPLES / "one_machine.sh", "sh", "-c", HERE).expect(0, "here 1 of 2")
        mpirun = {"MPIRUN": "mpirun.openmpi", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        sample(hosts, 1, SAMPLES / "mpirun.sh", "-n", 2, BIN / "collectives", **mpirun).expect(0, "2 ranks on 1 host")


def test_sample_script_for_two_machines(folder):
    token = pathlib.Path(folder) / "job.token"
    token.write_text("0123456789abcdef" * 4 + "\n")
    token.chmod(0o600)
    with Hosts(folder, 2) as hosts:
        both = [sample(hosts, host, SAMPLES / "two_machines.sh", BIN / "collectives", token="", FIRST="host2",
                       TOKEN_FILE=str(token)) for host in (1, 2)]
        both[0].expect(0)
        both[1].expect(0, "4 ranks on 2 hosts")  # the first machine's name says who leads


def test_sample_manifest_for_kubernetes(folder):
    """Each pod is a host, with the variables and the command of the manifest, but for the program."""
    text = (SAMPLES / "kubernetes.yaml").read_text()
    variables = dict(re.findall(r"- name: (PET_\w+)\n +value: \"(.*)\"", text))
    assert variables["PET_NNODES"] == "2" and "PET_NODE_RANK" in text, text
    assert '"lockstep", "run", "train"' in text, text
    with Hosts(folder, 2) as hosts:
        with open(hosts.folder + "/hosts", "a", encoding="ascii") as names:
            names.write("10.77.0.1 train-0.train\n")
        pods = [hosts.launch(pod + 1, LOCKSTEP, "run", "sh", "-c", HERE, PET_NODE_RANK=str(pod),
                             **variables | {"PET_NPROC_PER_NODE": "1"}) for pod in (0, 1)]
        pods[0].expect(0, "here 0 of 2, node 0")
        pods[1].expect(0, "here 1 of 2, node 1")


def test_gpus_are_counted_as_gpu_ids_hides_them(folder):
    """On a host with four, whose device nodes are in a /dev of this case's own."""
    devices = ("mount -t tmpfs none {0} && for name in null zero random urandom; do : > {0}/$name && "
               "mount --bind /dev/$name {0}/$name; done; touch {0}/nvidia{{0..3}} && mount --rbind {0} /dev && "
               'exec "$@"').format(folder)
    for flags, ranks in (("--multi_gpu", 4), ("--multi_gpu --gpu_ids 0,2", 2)):
        run("unshare", "-m", "bash", "-c", devices, "-", LOCKSTEP, "run", *flags.split(), "--dry-run", "true",
            CUDA_VISIBLE_DEVICES=None).expect(0, f"^{ranks} ranks on this host")


if __name__ == "__main__":
    wanted = sys.argv[3:]
    run_cases([case for name, case in list(globals().items())
               if name.startswith("test_") and (not wanted or name in wanted)])
