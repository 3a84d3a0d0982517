#!/usr/bin/env python3
"""Runs memcached's client libraries for Python against `farpool kv`, and prints one line for each.

    scripts/kv-clients.py [--farpool target/release/farpool]

Libraries that cannot be imported are skipped. `scripts/install-deps.sh test` puts them into target/kv-clients:

    target/kv-clients/bin/python scripts/kv-clients.py

Each sets and gets, gets 1,000 keys at once, stores 1 MiB, compares and sets, lets a value expire, stores without
reply, deletes, counts, and meets its errors. Exits with 1 if a library fails.
"""

import argparse
import asyncio
import atexit
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

PATIENCE_S = 10
KEYS = 1000
BIG = "b" * (1 << 20)
TOO_LARGE = "t" * (3 << 20)
RANDOM_TOO_LARGE = os.urandom(3 << 20)  # for those who compress


class Skip(Exception):
    """The library cannot do this."""


def until(what, condition):
    """Waits for a condition, for values expire at the server's next second."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_S} s in vain: {what}")
        time.sleep(0.05)


def same(given, expected, what):
    if isinstance(given, bytes):
        given = given.decode()
    if given != expected:
        raise AssertionError(f"{what}: {str(given)[:80]!r} instead of {str(expected)[:80]!r}")


def refuses(what, call, kinds=Exception):
    """The library tells of an error, by raising or by a false result."""
    try:
        result = call()
    except kinds:
        return
    if result:
        raise AssertionError(f"{what} was taken: {result!r}")


def text(value):
    return value.decode() if isinstance(value, bytes) else value


def run_pymemcache(host, port, _folder, **options):
    from pymemcache.client.base import Client
    from pymemcache.exceptions import MemcacheError

    client = Client((host, port), default_noreply=False, timeout=PATIENCE_S, **options)
    same(client.set("key", "value"), True, "set")
    same(client.get("key"), "value", "get")
    many = {f"many{number}": f"value{number}" for number in range(KEYS)}
    same(client.set_many(many), [], "set_many")
    found = {key: text(value) for key, value in client.get_many(list(many)).items()}
    same(found, many, "get_many")
    client.set("big", BIG)
    same(client.get("big"), BIG, "1 MiB")
    value, cas = client.gets("key")
    same(value, "value", "gets")
    same(client.cas("key", "newer", cas), True, "cas")
    same(client.cas("key", "late", cas), False, "an old cas")
    same(client.cas("nobody", "x", cas), None, "cas of nothing")
    client.set("short", "x", expire=1)
    until("the value expires", lambda: client.get("short") is None)
    client.set("quiet", "x", noreply=True)
    same(client.get("quiet"), "x", "noreply")
    same(client.delete("key"), True, "delete")
    same(client.delete("key"), False, "delete of nothing")
    client.set("number", "41")
    same(client.incr("number", 1), 42, "incr")
    same(client.decr("number", 50), 0, "decr")
    same(client.incr("nobody", 1), None, "incr of nothing")
    client.set("word", "abc")
    refuses("incr of a word", lambda: client.incr("word", 1), MemcacheError)
    refuses("a value of 3 MiB", lambda: client.set("large", TOO_LARGE), (MemcacheError, OSError))
    refuses("a key of 251 bytes", lambda: client.get("k" * 251), MemcacheError)
    same(client.touch("word", 100), True, "touch")
    client.flush_all()
    same(client.get("word"), None, "flush_all")
    client.close()


def run_memcache(host, port, _folder):
    import memcache

    client = memcache.Client([f"{host}:{port}"], cache_cas=True, server_max_value_length=4 << 20)
    same(bool(client.set("key", "value")), True, "set")
    same(client.get("key"), "value", "get")
    many = {f"many{number}": f"value{number}" for number in range(KEYS)}
    same(client.set_multi(many), [], "set_multi")
    same(client.get_multi(list(many)), many, "get_multi")
    client.set("big", BIG)
    same(client.get("big"), BIG, "1 MiB")
    same(client.gets("key"), "value", "gets")
    same(bool(client.cas("key", "newer")), True, "cas")
    client.set("key", "between")
    same(bool(client.cas("key", "late")), False, "an old cas")
    client.set("short", "x", time=1)
    until("the value expires", lambda: client.get("short") is None)
    client.set("quiet", "x", noreply=True)
    same(client.get("quiet"), "x", "noreply")
    same(bool(client.delete("key")), True, "delete")
    same(client.get("key"), None, "get of nothing")
    client.set("number", 41)
    same(client.incr("number"), 42, "incr")
    same(client.decr("number", 50), 0, "decr")
    same(client.incr("nobody"), None, "incr of nothing")
    refuses("a value of 3 MiB", lambda: client.set("large", TOO_LARGE))
    refuses("a key of 251 bytes", lambda: client.set("k" * 251, "x"))
    client.flush_all()
    same(client.get("number"), None, "flush_all")
    client.disconnect_all()


def run_pylibmc(host, port, _folder, **options):
    import pylibmc

    server = [f"{host}:{port}"]
    client = pylibmc.Client(server, behaviors={"cas": True, "tcp_nodelay": True}, **options)
    quiet = pylibmc.Client(server, behaviors={"_noreply": True}, **options)
    same(client.set("key", "value"), True, "set")
    same(client.get("key"), "value", "get")
    many = {f"many{number}": f"value{number}" for number in range(KEYS)}
    same(client.set_multi(many), [], "set_multi")
    same(client.get_multi(list(many)), many, "get_multi")
    client.set("big", BIG)
    same(client.get("big"), BIG, "1 MiB")
    value, cas = client.gets("key")
    same(value, "value", "gets")
    same(client.cas("key", "newer", cas), True, "cas")
    same(client.cas("key", "late", cas), False, "an old cas")
    client.set("short", "x", time=1)
    until("the value expires", lambda: client.get("short") is None)
    quiet.set("quiet", "x")
    until("the quiet value comes", lambda: client.get("quiet") == "x")
    same(client.delete("key"), True, "delete")
    same(client.delete("key"), False, "delete of nothing")
    client.set("number", 41)
    same(client.incr("number"), 42, "incr")
    same(client.decr("number", 50), 0, "decr")
    refuses("incr of nothing", lambda: client.incr("nobody"), pylibmc.Error)
    refuses("a value of 3 MiB", lambda: client.set("large", TOO_LARGE), pylibmc.Error)
    refuses("a key of 251 bytes", lambda: client.set("k" * 251, "x"), (pylibmc.Error, ValueError))
    client.flush_all()
    same(client.get("number"), None, "flush_all")


def run_libmc(host, port, _folder):
    import libmc

    client = libmc.Client([f"{host}:{port}"], do_split=False)
    client.config(libmc.MC_POLL_TIMEOUT, PATIENCE_S * 1000)
    same(client.set("key", "value"), True, "set")
    same(client.get("key"), "value", "get")
    many = {f"many{number}": f"value{number}" for number in range(KEYS)}
    same(client.set_multi(many), True, "set_multi")
    same(client.get_multi(list(many)), many, "get_multi")
    client.set("big", BIG)
    same(client.get("big"), BIG, "1 MiB")
    value, cas = client.gets("key")
    same(value, "value", "gets")
    same(client.cas("key", "newer", 0, cas), True, "cas")
    same(client.cas("key", "late", 0, cas), False, "an old cas")
    client.set("short", "x", 1)
    until("the value expires", lambda: client.get("short") is None)
    client.toggle_flush_all_feature(True)
    quiet = libmc.Client([f"{host}:{port}"], noreply=True)
    quiet.set("quiet", "x")
    until("the quiet value comes", lambda: client.get("quiet") == "x")
    same(client.delete("key"), True, "delete")
    same(client.get("key"), None, "get of nothing")
    client.set("number", 41)
    same(client.incr("number", 1), 42, "incr")
    same(client.decr("number", 50), 0, "decr")
    same(client.incr("nobody", 1), None, "incr of nothing")
    refuses("a value of 3 MiB", lambda: client.set_raw("large", TOO_LARGE.encode(), 0, 0))
    refuses("a key of 251 bytes", lambda: client.set("k" * 251, "x"))


async def emcache_steps(host, port):
    import emcache

    client = await emcache.create_client([emcache.MemcachedHostAddress(host, port)], timeout=PATIENCE_S)

    async def value_of(key):
        item = await client.get(key)
        return item.value.decode() if item else None

    await client.set(b"key", b"value")
    same(await value_of(b"key"), "value", "get")
    many = {f"many{number}".encode(): f"value{number}".encode() for number in range(KEYS)}
    for key, value in many.items():
        await client.set(key, value)
    found = await client.get_many(list(many))
    same({key: item.value for key, item in found.items()}, many, "get_many")
    await client.set(b"big", BIG.encode())
    same(await value_of(b"big"), BIG, "1 MiB")
    item = await client.gets(b"key")
    await client.cas(b"key", b"newer", item.cas)
    try:
        await client.cas(b"key", b"late", item.cas)
        raise AssertionError("an old cas was taken")
    except emcache.NotStoredStorageCommandError:
        pass
    await client.set(b"short", b"x", exptime=1)
    deadline = time.monotonic() + PATIENCE_S
    while await client.get(b"short"):
        if time.monotonic() > deadline:
            raise AssertionError("the value does not expire")
        await asyncio.sleep(0.05)
    await client.set(b"quiet", b"x", noreply=True)
    deadline = time.monotonic() + PATIENCE_S
    # Another connection of the pool may ask first.
    while await value_of(b"quiet") != "x":
        if time.monotonic() > deadline:
            raise AssertionError("the quiet value does not come")
        await asyncio.sleep(0.05)
    await client.delete(b"key")
    same(await value_of(b"key"), None, "delete")
    await client.set(b"number", b"41")
    same(await client.increment(b"number", 1), 42, "incr")
    same(await client.decrement(b"number", 50), 0, "decr")
    for what, call in {
        "incr of nothing": client.increment(b"nobody", 1),
        "delete of nothing": client.delete(b"nobody"),
        "a value of 3 MiB": client.set(b"large", TOO_LARGE.encode()),
        "a key of 251 bytes": client.get(b"k" * 251),
    }.items():
        try:
            await call
        except Exception:
            continue
        raise AssertionError(f"{what} was taken")
    await client.close()


def run_emcache(host, port, _folder):
    asyncio.run(asyncio.wait_for(emcache_steps(host, port), 6 * PATIENCE_S))


def run_meta_memcache(host, port, _folder):
    from meta_memcache import CacheClient, Key, ServerAddress, connection_pool_factory_builder

    client = CacheClient.cache_client_from_servers(
        servers=[ServerAddress(host=host, port=port)],
        connection_pool_factory_fn=connection_pool_factory_builder(recv_timeout=PATIENCE_S),
    )
    same(client.set(Key("key"), "value", ttl=100), True, "set")
    same(client.get(Key("key")), "value", "get")
    many = [Key(f"many{number}") for number in range(KEYS)]
    for key in many:
        client.set(key, f"value for {key.key}", ttl=100)
    found = {key.key: value for key, value in client.multi_get(many).items()}
    same(found, {key.key: f"value for {key.key}" for key in many}, "multi_get")
    client.set(Key("big"), BIG, ttl=100)
    same(client.get(Key("big")), BIG, "1 MiB")
    value, cas = client.get_cas(Key("key"))
    same(value, "value", "get_cas")
    same(client.set(Key("key"), "newer", ttl=100, cas_token=cas), True, "cas")
    same(client.set(Key("key"), "late", ttl=100, cas_token=cas), False, "an old cas")
    client.set(Key("short"), "x", ttl=1)
    until("the value expires", lambda: client.get(Key("short")) is None)
    client.set(Key("quiet"), "x", ttl=100, no_reply=True)
    until("the quiet value comes", lambda: client.get(Key("quiet")) == "x")
    same(client.delete(Key("key")), True, "delete")
    same(client.get(Key("key")), None, "get of nothing")
    same(client.delta_initialize(Key("number"), delta=1, initial_value=41, initial_ttl=100), True, "ma")
    same(client.delta_and_get(Key("number"), delta=1), 42, "incr")
    same(client.delta_and_get(Key("nobody"), delta=1), None, "incr of nothing")
    same(client.get(Key("k" * 300)), None, "a long key, which the library hashes")
    refuses("a value of 3 MiB", lambda: client.set(Key("large"), RANDOM_TOO_LARGE, ttl=100))


def run_pylibmc_binary(host, port, folder):
    run_pylibmc(host, port, folder, binary=True)


def run_pylibmc_sasl(host, port, folder):
    import pylibmc

    stranger = pylibmc.Client([f"{host}:{port}"], binary=True, username="foo", password="wrong")
    refuses("a wrong password", lambda: stranger.set("key", "value"), pylibmc.Error)
    member = {"binary": True, "username": "foo", "password": "bar"}
    try:
        pylibmc.Client([f"{host}:{port}"], **member).set("key", "value")
    except pylibmc.Error as error:
        if "FAILED TO SEND AUTHENTICATION" in str(error):
            raise Skip("this build of pylibmc has no SASL mechanism; Debian's python3-pylibmc has")
        raise
    run_pylibmc(host, port, folder, **member)


def run_bmemcached(host, port, _folder, **options):
    import bmemcached

    client = bmemcached.Client((f"{host}:{port}",), socket_timeout=PATIENCE_S, **options)
    same(client.set("key", "value"), True, "set")
    same(client.get("key"), "value", "get")
    many = {f"many{number}": f"value{number}" for number in range(KEYS)}
    same(client.set_multi(many), [], "set_multi")
    same(client.get_multi(list(many)), many, "get_multi")
    client.set("big", BIG, compress_level=0)
    same(client.get("big"), BIG, "1 MiB")
    value, cas = client.gets("key")
    same(value, "value", "gets")
    same(client.cas("key", "newer", cas), True, "cas")
    same(client.cas("key", "late", cas), False, "an old cas")
    same(client.add("key", "x"), False, "add of what is there")
    same(client.replace("nobody", "x"), False, "replace of nothing")
    client.set("short", "x", time=1)
    until("the value expires", lambda: client.get("short") is None)
    same(client.delete("key"), True, "delete")
    same(client.get("key"), None, "get of nothing")
    same(client.incr("number", 1, default=41), 41, "incr makes it")
    same(client.incr("number", 1), 42, "incr")
    same(client.decr("number", 50), 0, "decr")
    refuses("a value of 3 MiB", lambda: client.set("large", RANDOM_TOO_LARGE))
    # A number that got shorter is padded, as in memcached.
    same(client.get("number").strip(), "0", "what follows a refused value")
    if len(client.stats()) != 1:
        raise AssertionError("stats")
    client.flush_all()
    same(client.get("number"), None, "flush_all")
    client.disconnect_all()


def run_bmemcached_sasl(host, port, folder):
    import bmemcached

    refuses(
        "a wrong password",
        lambda: bmemcached.Client((f"{host}:{port}",), "foo", "wrong").set("key", "value"),
    )
    run_bmemcached(host, port, folder, username="foo", password="bar")


def tls_context(folder):
    import ssl

    return ssl.create_default_context(cafile=os.path.join(folder, "server.pem"))


def run_pymemcache_tls(host, port, folder):
    run_pymemcache(host, port, folder, tls_context=tls_context(folder))


def run_bmemcached_tls(host, port, folder):
    run_bmemcached(host, port, folder, tls_context=tls_context(folder))


# Name: module, steps, flags of the server; {} is a folder with a password file and a certificate.
SASL = ["-Y", "{}/passwords"]
TLS = ["-Z", "-o", "ssl_chain_cert={0}/server.pem,ssl_key={0}/server.key"]
LIBRARIES = {
    "pymemcache": ("pymemcache", run_pymemcache, []),
    "pymemcache-tls": ("pymemcache", run_pymemcache_tls, TLS),
    "python-memcached": ("memcache", run_memcache, []),
    "pylibmc": ("pylibmc", run_pylibmc, []),
    "pylibmc-binary": ("pylibmc", run_pylibmc_binary, []),
    "pylibmc-sasl": ("pylibmc", run_pylibmc_sasl, SASL),
    "python-binary-memcached": ("bmemcached", run_bmemcached, []),
    "python-binary-memcached-sasl": ("bmemcached", run_bmemcached_sasl, SASL),
    "python-binary-memcached-tls": ("bmemcached", run_bmemcached_tls, TLS),
    "libmc": ("libmc", run_libmc, []),
    "emcache": ("emcache", run_emcache, []),
    "meta-memcache": ("meta_memcache", run_meta_memcache, []),
}


def prepare(folder, flags):
    """Makes the password file or the certificate that the flags name."""
    if flags is SASL:
        with open(os.path.join(folder, "passwords"), "w") as file:
            file.write("foo:bar\n")
    if flags is not TLS or os.path.exists(os.path.join(folder, "server.key")):
        return
    if not shutil.which("openssl"):
        raise Skip("openssl is not installed")
    command = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"]
    command += ["-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-out", os.path.join(folder, "server.pem")]
    command += ["-keyout", os.path.join(folder, "server.key")]
    subprocess.run(command, check=True, capture_output=True)


def start(farpool, flags):
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [farpool, "kv", "--json", "-p", str(port), "-I", "2m", "-t", "2", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    line = server.stdout.readline()
    if not line:
        raise SystemExit(f"{farpool} kv does not start")
    host, port = json.loads(line)["listen"][0].rsplit(":", 1)
    return server, host, int(port)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--farpool", default="target/release/farpool", help="the binary")
    parser.add_argument("libraries", nargs="*", choices=[*LIBRARIES, []], help="only these")
    wanted = parser.parse_args()
    failed = False
    folder = tempfile.mkdtemp(prefix="kv-clients-")
    atexit.register(shutil.rmtree, folder)
    for name, (module, run, flags) in LIBRARIES.items():
        if wanted.libraries and name not in wanted.libraries:
            continue
        try:
            importlib.import_module(module)
        except ImportError as error:
            print(f"{name}: SKIPPED: {error}")
            continue
        try:
            prepare(folder, flags)
        except Skip as reason:
            print(f"{name}: SKIPPED: {reason}")
            continue
        server, host, port = start(wanted.farpool, [flag.format(folder) for flag in flags])
        try:
            run(host, port, folder)
            print(f"{name}: passed")
        except Skip as reason:
            print(f"{name}: SKIPPED: {reason}")
        except Exception as error:
            failed = True
            print(f"{name}: FAILED: {type(error).__name__}: {error}")
        finally:
            server.terminate()
            server.wait()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
