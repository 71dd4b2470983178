"""A step's bytes are counted in compiled modules: weights once, and what is moved beside."""

from __future__ import annotations

import pytest

from scripts.traffic import product_flops, step_bytes

# A product with a weight as it is, the gather of an embedding, a kernel that writes to the pages in
# place, and a loop over two layers that first copies each layer's weight out of the stack.
HLO = """HloModule m, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused_gather (table: bf16[1000,16], ids: s32[4]) -> bf16[4,16] {
  %table = bf16[1000,16]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  ROOT %rows = bf16[4,16]{1,0} gather(%table, %ids), offset_dims={1}
}

%fused_slice (stack: bf16[2,16,16], layer: s32[]) -> bf16[1,16,16] {
  %layer = s32[] parameter(1)
  %zero = s32[] constant(0)
  %stack = bf16[2,16,16]{2,1,0} parameter(0)
  ROOT %own = bf16[1,16,16]{2,1,0} dynamic-slice(%stack, %layer, %zero, %zero)
}

%fused_dot (x: bf16[4,16], w: bf16[16,16]) -> bf16[4,16] {
  %x = bf16[4,16]{1,0} parameter(0)
  %w = bf16[16,16]{1,0} parameter(1)
  ROOT %y = bf16[4,16]{1,0} dot(%x, %w)
}

%fused_next (i: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %next = s32[] add(%i, %one)
}

%fused_less (i: s32[]) -> pred[] {
  %i = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %less = pred[] compare(%i, %two), direction=LT
}

%body (loop: (s32[], bf16[4,16], bf16[2,16,16])) -> (s32[], bf16[4,16], bf16[2,16,16]) {
  %loop = (s32[], bf16[4,16]{1,0}, bf16[2,16,16]{2,1,0}) parameter(0)
  %own.1 = bf16[1,16,16]{2,1,0} fusion(%loop#2, %loop#0), kind=kLoop, calls=%fused_slice
  %view = bf16[16,16]{1,0} bitcast(%own.1)
  %x.1 = bf16[4,16]{1,0} get-tuple-element(%loop), index=1
  %y.1 = bf16[4,16]{1,0} fusion(%x.1, %view), kind=kCustom, calls=%fused_dot
  %next.1 = s32[] fusion(%loop#0), kind=kLoop, calls=%fused_next
  ROOT %t = (s32[], bf16[4,16]{1,0}, bf16[2,16,16]{2,1,0}) tuple(%next.1, %y.1, %loop#2)
}

%condition (loop: (s32[], bf16[4,16], bf16[2,16,16])) -> pred[] {
  %loop = (s32[], bf16[4,16]{1,0}, bf16[2,16,16]{2,1,0}) parameter(0)
  ROOT %less.1 = pred[] fusion(%loop#0), kind=kLoop, calls=%fused_less
}

ENTRY %main (params__embedding: bf16[1000,16], params__stack: bf16[2,16,16], params__head: bf16[16,16], cache_k: bf16[500,16], slots_tokens: s32[4]) -> bf16[4,16] {
  %params__embedding = bf16[1000,16]{1,0} parameter(0)
  %params__stack = bf16[2,16,16]{2,1,0} parameter(1)
  %params__head = bf16[16,16]{1,0} parameter(2)
  %cache_k = bf16[500,16]{1,0} parameter(3)
  %slots_tokens = s32[4]{0} parameter(4)
  %rows.1 = bf16[4,16]{1,0} fusion(%params__embedding, %slots_tokens), kind=kLoop, calls=%fused_gather
  %kernel = (bf16[4,16]{1,0}, bf16[500,16]{1,0}) custom-call(%rows.1, %cache_k), custom_call_target="ours", output_to_operand_aliasing={{1}: (1, {})}
  %zero = s32[] constant(0)
  %init = (s32[], bf16[4,16]{1,0}, bf16[2,16,16]{2,1,0}) tuple(%zero, %kernel#0, %params__stack)
  %w = (s32[], bf16[4,16]{1,0}, bf16[2,16,16]{2,1,0}) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
MORE
  ROOT %y = bf16[4,16]{1,0} fusion(%w#1, %params__head), kind=kCustom, calls=%fused_dot
}
"""  # noqa: E501
ROWS, WEIGHT = 4 * 16 * 2, 16 * 16 * 2


def test_what_a_step_moves():
    """A copied weight costs twice its bytes more; a gather reads its rows; kernels' pages are free.

    The state that the gather reads is four tokens.
    """
    found = step_bytes(HLO.replace("MORE\n", ""))
    assert found.weights == ROWS + 2 * WEIGHT + WEIGHT
    assert found.beside == 2 * 2 * WEIGHT + 4 * 4
    # What the gather, the kernel, two layers and the head read and write; and the loop counter,
    # which the slice, its increment and the condition read.
    assert found.activations == ROWS * (1 + 2 + 2 * 2 + 2) + 2 * (3 * 4 + 4 + 1)
    assert found.share_beside == found.beside / found.weights


@pytest.mark.parametrize(
    ("line", "more"),
    [
        # The head is read again, and its copy is written.
        ("  %copy.1 = bf16[16,16]{0,1} copy(%params__head)", 2 * WEIGHT),
        ("  %moved = bf16[500,16]{0,1} copy(%kernel#1)", 2 * 500 * 16 * 2),
        ("  %start = (s32[4]{0}, s32[4]{0}, u32[]) copy-start(%slots_tokens)", 2 * 4 * 4),
    ],
)
def test_what_is_moved_without_need(line: str, more: int):
    """Copies of weights, of pages and of slots count, and so does a weight that is read twice."""
    plain, other = (step_bytes(HLO.replace("MORE", text)) for text in ("", line))
    assert other.beside - plain.beside == more
    assert (other.weights, other.activations) == (plain.weights, plain.activations)


def test_a_partitioned_module_has_its_names_in_metadata():
    """Parameters are known by their metadata; a collective returns what follows its operands."""
    text = """HloModule m, is_scheduled=true

ENTRY %main (param.1: bf16[8,16], param.2: bf16[4,8]) -> bf16[4,16] {
  %param.1 = bf16[8,16]{1,0} parameter(0), metadata={op_name="params[\'head\']"}
  %param.2 = bf16[4,8]{1,0} parameter(1), metadata={op_name="slots.tokens"}
  %own = bf16[4,16]{1,0} dot(%param.2, %param.1)
  %start = ((bf16[4,16]{1,0}), bf16[4,16]{1,0}) all-reduce-start(%own), to_apply=%sum
  %done = bf16[4,16]{1,0} all-reduce-done(%start)
  ROOT %end = bf16[4,16]{1,0} negate(%done)
}
"""
    found = step_bytes(text)
    assert found.weights == 2 * 8 * 16
    assert found.beside == 2 * 4 * 8
    # The product and the sum write, the sum and the last instruction read, and that writes.
    assert found.activations == 2 * 4 * 16 * 5


# A kernel that reads rows of the plan, a layer's weight and the pages, each where it lies.
ON_SLICES = """HloModule m, is_scheduled=true

%kernel (p0: s32[64], p1: bf16[2,16,16], p2: bf16[500,16], p3: bf16[4,16]) -> (bf16[4,16]) {
  %p0 = s32[64]{0} parameter(0)
  %p1 = bf16[2,16,16]{2,1,0} parameter(1)
  %p2 = bf16[500,16]{1,0} parameter(2)
  %p3 = bf16[4,16]{1,0} parameter(3)
  %rows = s32[16]{0} slice(%p0), slice={[8:24]}
  %own = bf16[1,16,16]{2,1,0} slice(%p1), slice={[1:2], [0:16], [0:16]}
  %flat = bf16[16,16]{1,0} bitcast(%own)
  ROOT %called = (bf16[4,16]{1,0}) custom-call(%rows, %flat, %p2, %p3), custom_call_target="ours"
}

ENTRY %main (plan.1: s32[64], params.1: bf16[2,16,16], cache.1: bf16[500,16], \
params.2: bf16[4,16]) -> bf16[4,16] {
  %plan.1 = s32[64]{0} parameter(0)
  %params.1 = bf16[2,16,16]{2,1,0} parameter(1)
  %cache.1 = bf16[500,16]{1,0} parameter(2)
  %params.2 = bf16[4,16]{1,0} parameter(3)
  %out = (bf16[4,16]{1,0}) fusion(%plan.1, %params.1, %cache.1, %params.2), \
kind=kCustom, calls=%kernel, backend_config={"fusion_backend_config":\
{"custom_fusion_config":{"name":"dynamic_slice_fusion"}}}
  ROOT %y = bf16[4,16]{1,0} get-tuple-element(%out), index=0
}
"""


def test_a_kernel_gets_the_addresses_of_slices():
    """Neither are the pages counted, which it reads, nor the slices as copies."""
    found = step_bytes(ON_SLICES)
    assert found.weights == 16 * 16 * 2 + 4 * 16 * 2
    assert found.activations == 4 * 16 * 2
    assert found.beside == 16 * 4


def test_operations_of_products():
    """Products of XLA, of a library and of our kernels count, with one matrix a token."""
    text = """HloModule m, is_scheduled=true

%gemm (p: bf16[4,16], q: bf16[16,32]) -> bf16[4,32] {
  %p = bf16[4,16]{1,0} parameter(0)
  %q = bf16[16,32]{1,0} parameter(1)
  ROOT %dot = bf16[4,32]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[4,16], w: bf16[16,32], experts: bf16[8,32,6], sizes: s32[8]) -> bf16[4,6] {
  %x = bf16[4,16]{1,0} parameter(0)
  %w = bf16[16,32]{1,0} parameter(1)
  %experts = bf16[8,32,6]{2,1,0} parameter(2)
  %sizes = s32[8]{0} parameter(3)
  %fused = bf16[4,32]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %cublas = (bf16[4,32]{1,0}, s8[99]{0}) custom-call(%x, %w), LIBRARY
  ROOT %own = bf16[4,6]{1,0} custom-call(%fused, %experts, %sizes), OURS
}
"""
    axes = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    library = f'custom_call_target="__cublas$gemm", backend_config={axes}'
    own = 'custom_call_target="ours", backend_config={name = "grouped_matmul"}'
    text = text.replace("LIBRARY", library).replace("OURS", own)
    assert product_flops(text) == 2 * (2 * 4 * 16 * 32) + 2 * 4 * 32 * 6
