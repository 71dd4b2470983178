"""What the host does for a compiled module is read off XLA's dump of its thunks."""

from __future__ import annotations

import pytest

from scripts.launches import HostThunks, host_thunks, newest_dump

ON_HOST = """\
000: kCommandBuffer [source       | next=011 (1)]
    001: kCopy         [source | sink] kCopy
    002: kCustomKernel [source | sink] broadcast grid: [1, 1, 1]
003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source       | next=013 (1)] input_reduce_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        005: kCustomKernel [source | sink] add grid: [1, 1, 1]
    006: kCustomCall [source | sink] mosaic_gpu
"""
ALONE = """\
000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=011 (10)] kCopy
    002: kWhile        [prev=010 (1) | sink         ]
condition:
        003: kCustomKernel [source       | next=013 (1)] input_reduce_fusion grid: [1, 1, 1]
      body:
        004: kCustomKernel [source       | sink         ] loop_add_fusion_4 grid: [1, 1, 1]
"""


def test_loops_outside_of_command_buffers_are_decided_on_the_host():
    """The loop counts as a decision, and what is in no command buffer as a launch."""
    assert host_thunks(ON_HOST) == HostThunks(decisions=1, launches=2, graphs=2, recorded=3)


def test_a_loop_in_a_command_buffer_is_one_launch():
    """The device carries out the loop and its condition alone."""
    assert host_thunks(ALONE) == HostThunks(decisions=0, launches=0, graphs=1, recorded=4)


def test_dumps(tmp_path):
    """The newest dump of a function is read; other functions' and earlier ones are not."""
    end = "thunk_sequence_after_thunk_passes.txt"
    for name in ("module_0009.jit_decode_loop", "module_0010.jit_decode_loop", "module_0011.jit_f"):
        (tmp_path / f"{name}.{end}").write_text(name)
    assert newest_dump(tmp_path, "decode_loop") == "module_0010.jit_decode_loop"
    with pytest.raises(FileNotFoundError, match="no dump"):
        newest_dump(tmp_path, "mixed_body")
    with pytest.raises(ValueError, match="no thunks"):
        host_thunks("nothing")
