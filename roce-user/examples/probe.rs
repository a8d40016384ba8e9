//! probe
use roce_user::dataplane::Object;
fn main() -> anyhow::Result<()> {
    env_logger::init();
    let mut o = Object::load()?;
    for n in ["roce_tc_egress", "roce_tc_ingress", "roce_htb"] {
        let p = o.tc(n)?;
        println!("{n} {:?}", p.info()?.verified_instruction_count());
    }
    println!("xdp {:?}", o.xdp()?.info()?.verified_instruction_count());
    Ok(())
}
