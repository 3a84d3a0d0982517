"""The demo's Python job: every record an object with its fields, then questions about them.

Millions of small objects, as Python programs have them: built once, walked in order, sorted, and
looked up at random. Prints one line of JSON; the digest covers every answer, so it is the same
wherever the memory is.
"""
import collections
import hashlib
import json
import struct
import sys

RECORDS_FILE, RECORDS_LIMIT, LOOKUPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
LINES_PER_RECORD_LIMIT = 30
MOST_WANTED = 50


class Record:
    def __init__(self, name, value):
        self.name = name
        self.size_bytes = len(value)
        self.fields = {}
        for line in value.decode("latin-1").split("\n")[:LINES_PER_RECORD_LIMIT]:
            key, _, text = line.partition(": ")
            self.fields[key] = text

    def needs(self):
        """Names of the packages that this one depends on."""
        text = self.fields.get("Depends", "")
        return [part.split(None, 1)[0] for part in text.split(",") if part.strip()]


def read(path, limit):
    with open(path, "rb") as file:
        for _ in range(limit):
            lengths = file.read(8)
            if len(lengths) < 8:
                return
            key_bytes, value_bytes = struct.unpack("<II", lengths)
            yield file.read(key_bytes).decode("latin-1"), file.read(value_bytes)


def ask_about_all(records):
    """Sections by size, and what is depended on most."""
    sections, wanted = collections.Counter(), collections.Counter()
    for record in records:
        sections[record.fields.get("Section", "none")] += record.size_bytes
        wanted.update(record.needs())
    most = sorted(wanted.items(), key=lambda item: (-item[1], item[0]))[:MOST_WANTED]
    return sorted(sections.items()), most


def look_up(records, lookups):
    """Random records, each asked for one of its fields."""
    state = 1
    for _ in range(lookups):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        record = records[(state >> 33) % len(records)]
        keys = list(record.fields)
        key = keys[(state >> 20) % len(keys)]
        yield f"{record.name}|{key}|{record.fields[key]}\n"


def main():
    records = [Record(key, value) for key, value in read(RECORDS_FILE, RECORDS_LIMIT)]
    digest = hashlib.sha256(repr(ask_about_all(records)).encode())
    for answer in look_up(records, LOOKUPS):
        digest.update(answer.encode("latin-1"))
    for record in sorted(records, key=lambda record: (record.size_bytes, record.name))[::7]:
        digest.update(record.name.encode("latin-1"))
    print(json.dumps({"records": len(records), "digest": digest.hexdigest()}))


main()
