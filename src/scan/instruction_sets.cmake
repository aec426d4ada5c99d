# cpu_kernels.inc is compiled once per instruction set (cpu_kernels_<isa>.cpp) and chosen at run time.
# -ffp-contract=off: a fused multiply-add in one of them and not in another would give other bits.
# On another processor family all but the plain kernels compile to nothing.
set(nanlocator_isa_flags_plain "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(nanlocator_isa_flags_avx2 -mavx2 -mfma -mf16c)
  set(nanlocator_isa_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512
      -mavx2 -mfma -mf16c)
endif()
foreach(isa plain avx2 avx512)
  set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/scan/cpu_kernels_${isa}.cpp PROPERTIES
    COMPILE_OPTIONS "-O3;-ffp-contract=off;${nanlocator_isa_flags_${isa}}")
endforeach()
