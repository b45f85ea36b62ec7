// Three thermal zones for a QEMU guest, whose temperatures the host writes: tenths of a kelvin in
// guest memory at 0x7000000, which the guest's kernel leaves alone (memmap=64K$0x7000000).
//
// They are sensors of a platform's thermal framework (INT3403) and not ACPI's own zones: the kernel
// names each of these by itself, and calls all of those "acpitz". The NPU is throttled from 65 C on.
DefinitionBlock ("", "SSDT", 2, "SGTEST", "THERMAL", 0x00000003)
{
    Scope (\_SB)
    {
        OperationRegion (TMEM, SystemMemory, 0x7000000, 0x1000)
        Field (TMEM, DWordAcc, NoLock, Preserve) { TCPU, 32, TGPU, 32, TNPU, 32 }

        Device (CPUZ)
        {
            Name (_HID, "INT3403")
            Name (_UID, "CPUZ")
            Name (PTYP, 3)
            Method (_TMP) { Return (\_SB.TCPU) }
            Method (_PSV) { Return (2732 + 850) }
            Method (_CRT) { Return (2732 + 1250) }
        }
        Device (GPUZ)
        {
            Name (_HID, "INT3403")
            Name (_UID, "GPUZ")
            Name (PTYP, 3)
            Method (_TMP) { Return (\_SB.TGPU) }
            Method (_CRT) { Return (2732 + 1250) }
        }
        Device (NPUZ)
        {
            Name (_HID, "INT3403")
            Name (_UID, "NPUZ")
            Name (PTYP, 3)
            Method (_TMP) { Return (\_SB.TNPU) }
            Method (_PSV) { Return (2732 + 650) }
            Method (_CRT) { Return (2732 + 1250) }
        }
    }
}
