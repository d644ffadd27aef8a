"""Run the module with the arguments on standard input, without Ansible's packaging."""

import json
import sys

from ansible.module_utils.testing import patch_module_args
from ansible_collections.gpufleet.sglang.plugins.modules import flashinfer_jit_warm

arguments = json.load(sys.stdin)
check = arguments.pop("_check", False)
with patch_module_args({**arguments, "_ansible_check_mode": check}):
    flashinfer_jit_warm.main()
