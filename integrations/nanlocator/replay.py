"""Executes bundles again: ``run`` for the operator call, ``load`` for the module call around it.

    report = nanlocator.replay.run("nanlocator_run/a0/bundles/step12-...")
    print(report["conclusion"], *report["sentences"], sep="\\n")

    call = nanlocator.replay.load("nanlocator_run/a0/bundles/step12-...")
    again = call.bind(MyAttention(config))()      # the recorded weights and inputs, backward included
    again.outputs, again.grad_inputs

On the command line, ``python -m nanlocator.replay BUNDLE`` equals ``nanlocator replay BUNDLE``.
"""

import sys

from nanlocator.calls.import_path import leave_out_current_folder

if __name__ == "__main__":  # the package handles python -m, unless other code has imported it before
    leave_out_current_folder()

from nanlocator.calls.replay import (
    NotKept,
    RecordedModuleCall,
    RecordedObject,
    ReplayedModule,
    load,
    main,
    run,
)

__all__ = [
    "NotKept",
    "RecordedModuleCall",
    "RecordedObject",
    "ReplayedModule",
    "load",
    "run",
]


if __name__ == "__main__":
    sys.exit(main())
