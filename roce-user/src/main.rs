//! The `roce` program.

fn main() -> std::process::ExitCode {
    roce_user::cli::main()
}
