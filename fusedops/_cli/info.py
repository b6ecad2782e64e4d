"""``fusedops info``: versions, devices, backends."""

from __future__ import annotations

import argparse

from fusedops._cli.installation import environment
from fusedops._cli.output import print_fields, print_json, print_table

HELP = "versions, devices, policy and backends: the text to paste into an issue"


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    data = environment()
    if options.json:
        print_json(data)
        return 0
    fields = [("fusedops", data["fusedops"]), ("torch", data["torch"])]
    fields += [(name, version or "not installed") for name, version in data["versions"].items()]
    fields.append(("python", f"{data['python']} on {data['platform']}"))
    for kind, names in data["devices"].items():
        fields.append((kind, ", ".join(dict.fromkeys(names)) + (f" (x {len(names)})" if len(names) > 1 else "")))
    fields.append(("threads", data["threads"]))
    fields += data["variables"].items()
    fields += [("policy", data["policy"]), ("ops", ", ".join(data["ops"]))]
    print_fields(fields, least=(9,))
    print()
    rows = [
        (row["name"], row["state"], row["priority"], ", ".join(row["devices"]) or "-", row["distribution"])
        for row in data["backends"]
    ]
    print_table(("backend", "state", "priority", "devices", "from"), rows, right=(2,))
    widest = max([9, *(len(row["name"]) for row in data["backends"])])
    for row in data["backends"]:
        known = {"file": row["file"], "version": row["version"], "why": row["why"], "to fix": row["fix"]}
        notes = [("", label, text) for label, text in known.items() if text]
        print()
        print_fields([(row["name"], *notes[0][1:]), *notes[1:]], least=(widest, 7))
    return 0
