/* ipc/err.c: what is said at a terminal may hold the words of a file or a server. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>

#include "ipc/err.h"

static void control_characters_are_not_said(void **state)
{
    struct k3_err err = K3_ERR_INIT;

    (void)state;
    assert_int_equal(k3_refuse(&err, -EINVAL, "%s", "a\033]0;b\007\n\x7f\xc2\x9b" "2J \xc2\xa0\xc3\x9f\xc2"), -EINVAL);
    assert_string_equal(err.text, "a?]0;b????\?2J \xc2\xa0\xc3\x9f\xc2");
    assert_int_equal(err.exit_status, K3_EXIT_REFUSED);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(control_characters_are_not_said) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
