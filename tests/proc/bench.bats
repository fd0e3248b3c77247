#!/usr/bin/env bats
# k3-bench measures, so only its use is tested here; no test of this suite is timed.
load helpers

@test "k3-bench refuses what it does not measure, by name" {
    run "$K3_BIN/k3-bench" io
    [ "$status" -eq 2 ]
    [ "${#lines[@]}" -eq 1 ]
    [[ $output == *io*kernels* ]]
}
@test "k3-bench refuses kernels that have no limit to compare with" {
    run "$K3_BIN/k3-bench" --kernels c
    [ "$status" -eq 2 ]
    [[ $output == *avx2* ]]
}
