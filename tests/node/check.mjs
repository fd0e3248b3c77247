// What the programs below share: one line a check, and an exit code at the end.
let failed = 0;

// onFault(number) may look at what is left.
export async function check(name, fn, onFault) {
    try {
        await fn();
        console.log(`ok ${name}`);
    } catch (e) {
        failed++;
        console.log(`not ok ${name}: ${e?.stack ?? e}`);
        await onFault?.(failed);
    }
}
export const leave = () => process.exit(failed ? 1 : 0);
