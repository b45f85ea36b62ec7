// Three thermal zones for a QEMU guest, whose temperatures the host writes: tenths of a kelvin in
// guest memory at 0x7000000, which the guest's kernel leaves alone (memmap=64K$0x7000000).
DefinitionBlock ("", "SSDT", 2, "SGTEST", "THERMAL", 0x00000002)
{
    Scope (\_SB)
    {
        OperationRegion (TMEM, SystemMemory, 0x7000000, 0x1000)
        Field (TMEM, DWordAcc, NoLock, Preserve) { TCPU, 32, TGPU, 32, TNPU, 32 }
    }
    Scope (\_TZ)
    {
        ThermalZone (CPUZ)
        {
            Method (_TMP) { Return (\_SB.TCPU) }
            Method (_CRT) { Return (2732 + 1250) }
            Method (_PSV) { Return (2732 + 850) }
            Name (_TC1, 1)
            Name (_TC2, 1)
            Name (_TSP, 10)
            Name (_PSL, Package () { })
            Name (_TZP, 10)
        }
        ThermalZone (GPUZ)
        {
            Method (_TMP) { Return (\_SB.TGPU) }
            Method (_CRT) { Return (2732 + 1250) }
            Name (_TZP, 10)
        }
        ThermalZone (NPUZ)
        {
            Method (_TMP) { Return (\_SB.TNPU) }
            Method (_CRT) { Return (2732 + 1250) }
            Name (_TZP, 10)
        }
    }
}
