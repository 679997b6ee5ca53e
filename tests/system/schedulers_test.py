"""Programs started by others than `lockstep run`: real Open MPI, MPICH, torchrun, and Slurm on two pretend hosts.

python3 schedulers_test.py SOURCE_DIR BUILD_DIR        (as root: Slurm and the hosts' namespaces need it)
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from support.program import LIMIT_S, run, run_cases

SOURCE, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
BIN = BUILD / "bin"
PYTHON = SOURCE / ".deps/peers/bin/python"
SUPPORT = SOURCE / "tests/system/support"
OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPICH = ["mpirun.mpich"]


def expect_tour(done, ranks, hosts=1):
    """The tour of collectives went through, on so many ranks."""
    places = "1 host" if hosts == 1 else f"{hosts} hosts"
    done.expect(out=[rf"{ranks} ranks on {places}, .*: done$", rf"all_reduce +rank 0: {ranks * (ranks + 1) // 2} "])


def test_open_mpi_starts_a_program(_):
    expect_tour(run(*OPEN_MPI, "-n", 3, BIN / "collectives"), 3)


def test_mpich_starts_a_program(_):
    expect_tour(run(*MPICH, "-n", 3, BIN / "collectives"), 3)


def test_ranks_of_mpirun_on_one_host_have_a_secret(_):
    # Without one there is nothing to encrypt by.
    for mpirun in (OPEN_MPI, MPICH):
        done = run(*mpirun, "-n", 2, BIN / "collectives", LOCKSTEP_BACKEND="tcp", LOCKSTEP_TLS="1")
        done.expect(out=r"2 ranks on 1 host, tcp with TLS, ")


def test_mpich_starts_a_program_through_a_script(folder):
    # The ranks' parents are shells then, not mpirun's process.
    script = pathlib.Path(folder) / "wrapper"
    script.write_text(f"#!/bin/sh\n{BIN}/collectives\nexit $?\n")
    script.chmod(0o755)
    expect_tour(run(*MPICH, "-n", 2, script), 2)


def test_several_launchers_of_mpirun_are_refused(_):
    launcher = [BIN / "lockstep", "run", "--nproc-per-node", 1]
    for mpirun in (OPEN_MPI, MPICH):
        done = run(*mpirun, "-n", 2, *launcher, "echo", "started")
        assert "started" not in done.out, done
        done.expect(2, err=r"mpirun has started 2 launchers .*: write mpirun PROGRAM, .*\(--standalone: as meant\)")
        run(*mpirun, "-n", 2, *launcher, "--standalone", "echo", "started").expect(out=r"started\n(.*\n)*started")
        run(*mpirun, "-n", 1, *launcher, "echo", "started").expect(out=r"started")


def test_mpirun_trains(_):
    for mpirun in (OPEN_MPI, MPICH):
        done = run(*mpirun, "-n", 4, BIN / "mnist", "--epochs", 1, OMP_NUM_THREADS="1")
        done.expect(out=r"4 ranks on 1 host, shm")


class TwoHosts:
    """Two pretend hosts, on which an mpirun that seems to be on the first starts ranks through its usual agent."""

    def __init__(self, folder):
        self.hosts, self.agent = folder + "/hosts", pathlib.Path(folder) / "agent"
        # As ssh: options, the host's name, a command.
        self.agent.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n'
                              f'exec {SUPPORT}/hosts.sh run {self.hosts} "${{host#host}}" sh -c "$*"\n')
        self.agent.chmod(0o755)

    def __enter__(self):
        run(SUPPORT / "hosts.sh", "up", self.hosts, 2).expect()
        return self

    def __exit__(self, *_):
        run(SUPPORT / "hosts.sh", "down", self.hosts)

    def mpirun(self, mpirun, *words, **variables):
        host1 = pathlib.Path(self.hosts, "host1.pid").read_text().strip()
        return run("nsenter", "-t", host1, "--net", "--uts", "--", *mpirun, *words, OMP_NUM_THREADS="1", **variables)


def test_mpirun_over_two_hosts(folder):
    with TwoHosts(folder) as two:
        launchers = ([*OPEN_MPI, "--host", "host1:2,host2:2", "--mca", "plm_rsh_agent", two.agent],
                     [*MPICH, "-hosts", "host1:2,host2:2", "-launcher", "ssh", "-launcher-exec", two.agent])
        for mpirun in launchers:
            expect_tour(two.mpirun(mpirun, "-n", 4, BIN / "collectives"), 4, hosts=2)
            # They have a secret, too, by which they encrypt.
            tls = ["-x", "LOCKSTEP_TLS"] if mpirun[0] == OPEN_MPI[0] else []
            expect_tour(two.mpirun(mpirun, *tls, "-n", 4, BIN / "collectives", LOCKSTEP_TLS="1"), 4, hosts=2)
            # Whoever knows better says so.
            given = ["-x", "MASTER_ADDR", "-x", "MASTER_PORT"] if mpirun[0] == OPEN_MPI[0] else []
            done = two.mpirun(mpirun, *given, "-n", 2, "-map-by" if given else "-ppn", "node" if given else 1,
                              BIN / "collectives", MASTER_ADDR="10.77.0.1", MASTER_PORT="29871")
            expect_tour(done, 2, hosts=2)


def test_mpich_deals_ranks_out_in_turn(folder):
    with TwoHosts(folder) as two:
        done = two.mpirun([*MPICH, "-hosts", "host1,host2", "-launcher", "ssh", "-launcher-exec", two.agent], "-n", 3,
                          BIN / "collectives")
        expect_tour(done, 3, hosts=2)


def test_two_mpi_jobs_at_once_do_not_meet(folder):
    for mpirun in (OPEN_MPI, MPICH):
        # Open MPI's fails now and then when another makes its folder at the same time.
        jobs = [subprocess.Popen([*mpirun, "-n", "2", BIN / "collectives"], stdout=subprocess.PIPE, text=True,
                                 env=os.environ | {"TMPDIR": tempfile.mkdtemp(dir=folder)}) for _ in range(2)]
        for job in jobs:
            out, _ = job.communicate(timeout=LIMIT_S)
            assert job.returncode == 0 and re.search(r"^2 ranks on 1 host", out, re.MULTILINE), out


def test_torchrun_starts_a_program(_):
    done = run(PYTHON, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", 2, BIN / "collectives")
    expect_tour(done, 2)


class Cluster:
    """A Slurm of two nodes, each a pretend host with a network, a host name and a process table of its own."""

    def __init__(self, folder):
        self.hosts, self.slurm = folder + "/hosts", folder + "/slurm"

    def __enter__(self):
        # Whatever was begun is ended, too, when a step of it fails.
        try:
            self.script("hosts.sh", "up", self.hosts, 2)
            self.script("slurm.sh", "start", self.slurm, 2, 4, HOSTS=self.hosts)
        except AssertionError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if os.path.exists(self.slurm + "/nodes"):
            self.script("slurm.sh", "stop", self.slurm)
        self.script("hosts.sh", "down", self.hosts)

    @staticmethod
    def script(name, *words, **variables):
        return run(SUPPORT / name, *words, **variables).expect()

    def client(self, *words, **variables):
        return run(SUPPORT / "slurm.sh", "client", self.slurm, *words, **variables)

    def start(self, *words):
        return subprocess.Popen([SUPPORT / "slurm.sh", "client", self.slurm, *map(str, words)], stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)

    def await_line(self, job, pattern):
        for line in job.stdout:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"the job ended before it said /{pattern}/: {job.wait()}")


def test_slurm(folder):
    with Cluster(folder) as cluster:
        # Both nodes, one node, and tasks that are not spread evenly.
        expect_tour(cluster.client("srun", "-N2", "-n4", BIN / "collectives"), 4, hosts=2)
        expect_tour(cluster.client("srun", "-N1", "-n3", BIN / "collectives"), 3)
        expect_tour(cluster.client("srun", "-N2", "-n3", "-m", "cyclic", BIN / "collectives"), 3, hosts=2)
        # A launcher as the only task has ranks of its own.
        done = cluster.client("srun", "-N1", "-n1", BIN / "lockstep", "run", "--nproc-per-node", 2, BIN / "collectives")
        done.expect(out=r"^\[rank 0\] 2 ranks on 1 host")
        expect_tour(cluster.client("srun", "--mpi=pmi2", "-N2", "-n4", BIN / "collectives"), 4, hosts=2)
        # Tasks have a secret, too, by which they encrypt; without MUNGE they have to be given one.
        encrypted = {"LOCKSTEP_TLS": "1", "LOCKSTEP_TIMEOUT": "60"}
        expect_tour(cluster.client("srun", "-N2", "-n4", BIN / "collectives", **encrypted), 4, hosts=2)
        done = cluster.client("srun", "-N2", "-n4", "env", "SLURM_CONF=/nowhere", BIN / "collectives", **encrypted)
        done.expect(2, err=r"the ranks share no secret")
        expect_tour(cluster.client("srun", "-N2", "-n4", "env", "SLURM_CONF=/nowhere", BIN / "collectives"), 4, hosts=2)
        # A launcher on each node, which need not be told where the others are.
        launcher = [BIN / "lockstep", "run", "--nproc-per-node", 2, BIN / "collectives"]
        token = {"LOCKSTEP_TOKEN": "a token that only this test knows"}
        for given in (token, {}):
            done = cluster.client("srun", "-N2", "--ntasks-per-node=1", *launcher, **given)
            done.expect(out=r"^\[rank 0\] 4 ranks on 2 hosts")
        # Without a secret and MUNGE, or with several on a node, they say what to write.
        done = cluster.client("srun", "-N2", "--ntasks-per-node=1", "env", "SLURM_CONF=/nowhere", *launcher)
        done.expect(2, err=r"export LOCKSTEP_TOKEN=\$\(openssl rand -hex 32\) before srun \(with MUNGE .*munge.socket")
        done = cluster.client("srun", "-N2", "-n4", *launcher, **token)
        done.expect(2, err=r"srun has started 4 launchers on 2 nodes .*srun --ntasks-per-node=1 lockstep run")
        # A job of two parts, whose nodes the step's lists have in another order.
        parts = ["srun", "-w", "host2", "-n1", BIN / "collectives", ":", "-w", "host1", "-n2", BIN / "collectives"]
        cluster.client(*parts).expect(2, err=[r"rank 0 runs on host2, not on host1", r"rank 0 does not run on host1"])
        expect_tour(cluster.client(*parts, MASTER_ADDR="host2"), 3, hosts=2)
        launcher = launcher[:2] + ["--nproc-per-node", 1, BIN / "collectives"]
        parts = ["srun", "-w", "host2", "-n1", *launcher, ":", "-w", "host1", "-n1", *launcher]
        cluster.client(*parts, **token).expect(out=r"^\[rank 0\] 2 ranks on 2 hosts")
        # A rank's variables around srun: each task takes itself for a world.
        alone = cluster.client(*launcher[:4], "srun", "-N2", "-n2", BIN / "collectives")
        alone.expect(err=r"WORLD_SIZE=1, but SLURM_STEP_NUM_TASKS=2")
        # mpirun in an allocation: the ranks' Slurm variables are its own daemon's.
        done = cluster.client("salloc", "-N1", "-n2", *MPICH, "-launcher", "fork", "-n", 2, BIN / "collectives")
        expect_tour(done, 2)
        # A batch script's own shell is no task, though it has SLURM_PROCID.
        script = pathlib.Path(folder) / "batch"
        script.write_text(f"#!/bin/sh\n{BIN}/collectives\n")
        cluster.client("sbatch", "-W", "-n4", "-o", folder + "/out", script).expect()
        assert "done" in (text := pathlib.Path(folder, "out").read_text()), text
        assert "start the program with srun" in text, text


# As a launcher that asks for the job's secret. Prints how many bytes came back.
ASK = """
import socket, struct, subprocess, sys
user, munge, port, job = sys.argv[1:]
request = f"lockstep secret 1\\n{job}\\n{64 * '0'}\\n"
seal = ["setpriv", "--reuid", user, "--clear-groups", "munge", "--socket", munge, "--string", request]
credential = subprocess.run(seal, check=True, stdout=subprocess.PIPE).stdout.strip()
with socket.create_connection(("10.77.0.1", int(port)), timeout=30) as server:
    server.sendall(struct.pack("<I", len(credential)) + credential)
    answer = b"".join(iter(lambda: server.recv(4096), b""))
print("bytes:", len(answer))
"""


def test_slurms_launchers_give_the_secret_to_their_user_alone(folder):
    os.chmod(folder, 0o711)  # another user reaches MUNGE's socket, as on a cluster
    with Cluster(folder) as cluster:
        job = cluster.start("srun", "-N2", "--ntasks-per-node=1", BIN / "lockstep", "run", "--verbose",
                            "sh", "-c", "echo here; exec sleep 1000")
        port = re.search(r"\d+$", cluster.await_line(job, "launchers of this user get one at port")).group()
        cluster.await_line(job, r"\[rank 1\] here")

        def ask(user, job_id):
            return cluster.client(sys.executable, "-c", ASK, user, cluster.slurm + "/munge/socket", port, job_id)

        ask("0", "slurm-1.0").expect(out=r"^bytes: [1-9]\d\d")
        ask("65534", "slurm-1.0").expect(out=r"^bytes: 0")
        ask("0", "slurm-1.1").expect(out=r"^bytes: 0")
        cluster.client("scancel", "1").expect()
        job.communicate(timeout=LIMIT_S)


def test_slurms_sample_script(folder):
    with Cluster(folder) as cluster:
        out = pathlib.Path(folder) / "out"
        path = f"{BIN}:{os.environ['PATH']}"
        script = SOURCE / "examples/launch/slurm.sh"
        cluster.client("sbatch", "-W", "-o", out, script, BIN / "collectives", PATH=path, RANKS="2").expect()
        assert re.search(r"^\[rank 0\] 4 ranks on 2 hosts", out.read_text(), re.MULTILINE), out.read_text()


def await_log(log, pattern, count=1):
    """What the file has of the pattern, when that is as often as `count`."""
    for _ in range(LIMIT_S * 20):
        text = log.read_text() if log.exists() else ""
        found = re.findall(pattern, text, re.MULTILINE)
        if len(found) >= count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not {count} times /{pattern}/:\n{text}")


def test_slurms_preemption_notice_and_requeue(folder):
    log = pathlib.Path(folder) / "out"
    script = pathlib.Path(folder) / "batch"
    script.write_text(f"#!/bin/sh\nexec srun {BIN}/lockstep run --nproc-per-node 2 "
                      f"sh -c 'echo attempt ${{SLURM_RESTART_COUNT:-0}}; exec {BIN}/test_launch rank preempted'\n")

    with Cluster(folder) as cluster:
        submitted = cluster.client("sbatch", "-N1", "-n1", "--requeue", "--open-mode=append", "-o", log, script)
        job = submitted.expect(out=r"job (\d+)").group(1)
        await_log(log, "ready", 2)
        # The nodes are taken away: the ranks save, and the job comes back by itself.
        cluster.client("scontrol", "requeue", job).expect()
        await_log(log, "saved on SIGTERM", 2)
        await_log(log, "attempt 1", 2)
        await_log(log, "ready", 4)
        # What --signal=USR1@60 does a minute before the time limit.
        cluster.client("scancel", "--signal=USR1", job).expect()
        await_log(log, "saved on SIGUSR1", 2)


def test_a_suspended_job_over_two_hosts_says_that_it_did_not_run(folder):
    log = pathlib.Path(folder) / "out"
    script = pathlib.Path(folder) / "batch"
    script.write_text("#!/bin/sh\nexport LOCKSTEP_TOKEN=a_token_that_only_this_test_knows\n"
                      f"exec srun {BIN}/lockstep run --rdzv-conf heartbeat_timeout=1,keep_alive_interval=0.2 "
                      "sh -c 'echo here; exec sleep 1000'\n")

    with Cluster(folder) as cluster:
        submitted = cluster.client("sbatch", "-N2", "--ntasks-per-node=1", "-o", log, script)
        job = submitted.expect(out=r"job (\d+)").group(1)
        await_log(log, "here", 2)
        cluster.client("scontrol", "suspend", job).expect()
        time.sleep(3)  # longer than the hosts wait for each other
        cluster.client("scontrol", "resume", job).expect()
        await_log(log, r"this launcher did not run for \d+\.\d s \(stopped by scontrol suspend", 2)
        await_log(log, r"no answer for 1 s|was lost", 1)


def test_a_preempted_training_is_requeued_and_resumes_over_two_hosts(folder):
    log = pathlib.Path(folder) / "out"

    with Cluster(folder) as cluster:
        runs = pathlib.Path(folder) / "runs"
        submitted = cluster.client("sbatch", "-o", log, SOURCE / "examples/launch/slurm.sh", BIN / "resume",
                                   "--directory", runs, "--steps", 10**9, "--save-every", 1000,
                                   PATH=f"{BIN}:{os.environ['PATH']}", RANKS="2")
        job = submitted.expect(out=r"job (\d+)").group(1)
        await_log(log, r"^\[rank 0\] starts at step (\d+)")
        # What Slurm does before the time limit: every rank gets it, sooner or later.
        cluster.client("scancel", "--signal=USR1", job).expect()
        left = int(await_log(log, r"saved and leaves after step (\d+)")[-1])
        assert int(await_log(log, r"resumes at step (\d+)")[-1]) == left, log.read_text()
        # The job is taken away: SIGTERM.
        cluster.client("scontrol", "requeue", job).expect()
        again = int(await_log(log, r"saved and leaves after step (\d+)", 2)[-1])
        assert again > left and int(await_log(log, r"resumes at step (\d+)", 2)[-1]) == again, log.read_text()
        cluster.client("scancel", job).expect()


def test_of_a_job_array_the_preempted_task_alone_is_requeued(folder):
    runs = pathlib.Path(folder)

    with Cluster(folder) as cluster:
        script = runs / "batch"
        script.write_text("#!/bin/sh\n"
                          f"exec {SOURCE}/examples/launch/slurm.sh {BIN}/resume --directory {runs}/run"
                          "$SLURM_ARRAY_TASK_ID --steps 1000000000 --save-every 1000\n")
        submitted = cluster.client("sbatch", "--array=0-1", "-N1", "--requeue", "--open-mode=append", "-o",
                                   runs / "out%a", script, PATH=f"{BIN}:{os.environ['PATH']}", RANKS="1")
        job = submitted.expect(out=r"job (\d+)").group(1)
        for task in (0, 1):
            await_log(runs / f"out{task}", r"starts at step \d+")
        # The array's last task has the array's own id.
        last = f"{job}_1"
        cluster.client("scontrol", "show", "job", last).expect(out=rf"JobId={job} ArrayJobId={job}")
        cluster.client("scancel", "--signal=USR1", last).expect()
        await_log(runs / "out1", r"resumes at step \d+")
        cluster.client("scontrol", "show", "job", f"{job}_0").expect(out=r"Restarts=0")
        assert "resumes" not in (text := (runs / "out0").read_text()) and "saved" not in text, text
        cluster.client("scancel", job).expect()


if __name__ == "__main__":
    wanted = sys.argv[3:]
    run_cases([case for name, case in list(globals().items())
               if name.startswith("test_") and (not wanted or name in wanted)])
