"""What the scripts that measure `farpool kv` share: servers on a processor of their own, `farpool kv bench` on the last one."""

import contextlib, json, os, pathlib, signal, socket, subprocess, sys, time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FARPOOL = str(ROOT / os.environ.get("CARGO_TARGET_DIR", "target") / "release/farpool")
CLIENT_CPU = str(os.cpu_count() - 1)

if not os.access(FARPOOL, os.X_OK):
    sys.exit("no release build: make build")


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


@contextlib.contextmanager
def server(command, port, cpu="0", cgroup=None):
    def enter():
        if cgroup:
            (cgroup / "cgroup.procs").write_text("0")
    process = subprocess.Popen(["taskset", "-c", cpu] + command, stdout=subprocess.DEVNULL, preexec_fn=enter)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"{' '.join(command)} does not listen")
                time.sleep(0.02)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def bench(seconds, *flags):
    command = [FARPOOL, "kv", "bench", "--json", "--client-cpu", CLIENT_CPU, "--closed", "--warm-up", "500ms", "--connections", "1"]
    if "--connections" in flags:
        command = command[:-2]
    done = subprocess.run(command + ["--duration", f"{round(seconds * 1000)}ms", *map(str, flags)], stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"kv bench {' '.join(map(str, flags))} ended with {done.returncode}")
    return json.loads(done.stdout)


def stats(port):
    with socket.create_connection(("127.0.0.1", port)) as it:
        it.sendall(b"stats\r\n")
        text = b""
        while not text.endswith(b"END\r\n"):
            text += it.recv(65536)
    return dict(line.split(" ")[1:3] for line in text.decode().splitlines() if line.startswith("STAT "))
